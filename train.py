"""Tokens -> a trained run directory, by teacher forcing.

python train.py config/quick.toml
python train.py config/quick.toml --text=my_text.txt
python train.py config/quick.toml --text=my_text.txt --resume --max_iters=4000
"""

import contextlib
import math
import platform
import shlex
import signal
import sys
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from config.command_line import Given, read_given
from config.errors import UserError, run_command
from config.schema import SampleSettings, TrainSettings
from data.batches import TrainingBatches
from data.dataset import PreparedData
from engine import distributed
from engine.activations import checkpoint_activations
from engine.checkpoint import model_from_checkpoint
from engine.decoding import NextLogits
from engine.device import (
    autocast,
    choose_device,
    choose_dtype,
    compiled_or_eager,
    describe_device,
    keep_freed_memory,
    peak_flops,
)
from engine.evaluation import Evaluation, evaluate_tokens
from engine.generation import generate
from engine.optimizer import learning_rate_at, make_optimizer
from engine.rehearsal import foresee, rehearse
from engine.run import (
    Beginning,
    Run,
    how_to_begin,
    is_to_be_shared,
    open_data,
    place_of_run,
    refuse_occupied,
    sole_use,
)
from engine.sharding import shard, whole
from engine.signals import StopSignals
from engine.step_memory import StepMemory
from engine.text_stream import start_of_document, stream_text
from engine.tracking import SilentTracker, Tracker
from model import GPT
from views.run_page import write_run_page


def main(argv: list[str]) -> None:
    """Train in the run directory that the command line means."""
    given = read_given(TrainSettings, argv, takes_preset=True)
    out_dir, asked = place_of_run(given)
    resume = asked.resume or (distributed.was_restarted() and (out_dir / "last.pt").exists())
    if asked.dry_run:
        begin(given, out_dir, resume)
        return
    with sole_use(out_dir) if distributed.is_first() else contextlib.nullcontext():
        if not resume:
            with distributed.said_once():
                refuse_occupied(out_dir)
        begin(given, out_dir, resume)


def begin(given: Given, out_dir: Path, resume: bool) -> None:
    """Start a run in its directory, or go on with the one that is there; or find out what an update takes."""
    with distributed.said_once():
        beginning = how_to_begin(given, out_dir, resume)
        settings = beginning.settings
        own = distributed.own_micro_batches(settings.gradient_accumulation_steps)
        device = distributed.own_device(choose_device(settings.device))
        dtype, dtype_reason = choose_dtype(settings.dtype, device, training=True)
    keep_freed_memory()
    with distributed.process_group(device, settings.collective_timeout):
        with distributed.said_once():
            with distributed.first_one_first():
                data = open_data(settings, beginning.checkpoint, beginning.tokenizer)
            expected = foresee(settings, data, device, dtype) if settings.dry_run else None
            run, batches = set_up(beginning, data, own, device, dtype)
        resumed = beginning.checkpoint is not None
        del beginning
        hardware = f"{describe_device(device)}, {str(dtype).removeprefix('torch.')} ({dtype_reason})"
        facts = summary(run, batches, hardware)
        say_facts(facts)
        if expected is not None:
            say_facts(rehearse_updates(run, batches, dtype, expected))
            return
        if resumed and run.is_finished:
            say(f"nothing to do: the run is finished after {run.progress.step:,} updates; give a larger --max_iters")
            return
        with distributed.said_once():
            train(run, batches, dtype, facts)


def set_up(
    beginning: Beginning, data: PreparedData, own: range, device: torch.device, dtype: torch.dtype
) -> tuple[Run, TrainingBatches]:
    """Model, optimizer and batches, as they were where a run goes on.

    Args:
        beginning: settings and what was saved.
        data: to learn from.
        own: micro-batches of this process.
        device, dtype: where it trains, and in which precision.

    Raises:
        UserError: something is missing or contradicts what was saved.
    """
    settings = beginning.settings
    model = make_model(beginning, data)
    if settings.activation_checkpointing:
        checkpoint_activations(model)
    if is_to_be_shared(settings):
        shard(model, device, dtype)
    else:
        model.to(device)
    batches = TrainingBatches(
        data.train,
        block_size=settings.block_size,
        batch_size=settings.batch_size,
        micro_batches=settings.gradient_accumulation_steps,
        seed=settings.seed,
        device=device,
        own=own,
    )
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    run = Run(Path(settings.out_dir), settings, data, model, make_optimizer(model, settings), scaler)
    peak = peak_flops(settings.peak_flops, device, dtype)
    run.peak_flops = None if peak is None else peak * distributed.world_size()
    if beginning.checkpoint is not None:
        run.restore(beginning.checkpoint)
    return run, batches


def rehearse_updates(run: Run, batches: TrainingBatches, dtype: torch.dtype, expected: StepMemory) -> dict[str, str]:
    """Do a few updates that nobody keeps; what they take."""
    forward = prepared(run, batches, dtype)
    return rehearse(run, batches.tokens_per_step, expected, lambda step: update(run, forward, batches, step, dtype))


def say(line: str) -> None:
    """Print something; of several processes, the first does."""
    if distributed.is_first():
        print(line)


def say_facts(facts: dict[str, str]) -> None:
    """Print what is known, a line each."""
    say("\n".join(f"{name:<11} {fact}" for name, fact in facts.items()))


def make_model(beginning: Beginning, data: PreparedData) -> GPT:
    """A new model from the seed, or the one in a checkpoint, with a context as short as the settings say.

    Raises:
        UserError: the checkpoint contradicts itself.
    """
    settings, origin, path = beginning.settings, beginning.origin, beginning.origin_path
    if origin is not None:
        changes = {"attention_impl": settings.attention_impl, "dropout": settings.dropout}
        model = model_from_checkpoint(origin, path, **changes)
        if settings.init_from and settings.block_size < model.config.block_size:
            model.crop_block_size(settings.block_size)
        if model.config != settings.gpt_config(data.tokenizer.vocab_size):
            raise UserError(f"{path}: its settings and its architecture contradict each other")
        return model
    torch.manual_seed(settings.seed)
    return GPT(settings.gpt_config(data.tokenizer.vocab_size))


def train(run: Run, batches: TrainingBatches, dtype: torch.dtype, facts: dict[str, str]) -> None:
    """The training loop: every update learns from one global batch; validations and checkpoints come between.

    Args:
        run, batches: what learns, and from what.
        dtype: of the matrix products.
        facts: for the run's page.
    """
    settings, progress = run.settings, run.progress
    forward = prepared(run, batches, dtype)
    run.write_settings()
    first = distributed.is_first()
    tracker = Tracker(run.out_dir, settings, progress.step, run.wandb_id) if first else SilentTracker()
    run.wandb_id = tracker.wandb_id
    stopped = False
    with tracker, StopSignals() as signals:
        if settings.max_iters == 0:
            take_stock(run, tracker, dtype, facts)
        for step in range(progress.step, settings.max_iters):
            run.optimizer.set_learning_rate(learning_rate_at(step, settings))
            loss, gradient_norm = update(run, forward, batches, step, dtype)
            progress.step = step + 1
            tracker.advance()
            if is_due(progress.step, settings.log_interval, settings.max_iters) or step == 0:
                record_update(run, tracker, batches, loss.item(), gradient_norm.item())
            if is_due(progress.step, settings.eval_interval, settings.max_iters):
                take_stock(run, tracker, dtype, facts)
            stopped = distributed.any_of_all(signals.received is not None)
            if stopped or run.patience_is_over:
                break
        leave(run, tracker, (signals.received or signal.SIGTERM) if stopped else None)


def prepared(run: Run, batches: TrainingBatches, dtype: torch.dtype) -> torch.nn.Module:
    """The model in training mode, compiled and wrapped as the settings say."""
    model = run.model.train()
    forward = compiled_or_eager(model, *next(batches.global_batch(0)), dtype) if run.settings.compile else model
    return forward if run.is_shared else distributed.replicated(forward, model.device)


def update(
    run: Run, forward: torch.nn.Module, batches: TrainingBatches, step: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """One update of the weights: the mean loss over the global batch, and the gradient's norm before clipping."""
    settings, parts = run.settings, []
    for micro_step, (inputs, targets) in zip(batches.own, batches.global_batch(step), strict=True):  # (B, T), (B, T)
        if settings.dropout > 0:
            torch.manual_seed(dropout_seed(settings.seed, step, micro_step))
        with distributed.unsynchronised(forward, micro_step != batches.own[-1]):
            with autocast(inputs.device, dtype):
                _, loss = forward(inputs, targets, return_logits=False)
            loss = loss / settings.gradient_accumulation_steps
            # Gradients are averaged over the processes, and it is their sum that is wanted.
            run.scaler.scale(loss * distributed.world_size()).backward()
        parts.append(loss.detach())
    optimizer = cast(torch.optim.Optimizer, run.optimizer)  # the scaler asks for its groups and its step alone
    run.scaler.unscale_(optimizer)
    gradients = [parameter.grad for parameter in run.model.parameters() if parameter.grad is not None]
    gradient_norm = whole(torch.nn.utils.get_total_norm(gradients))
    loss = distributed.summed(torch.stack(parts).sum())
    if is_to_be_made(run, loss, gradient_norm, step):
        if settings.grad_clip:
            torch.nn.utils.clip_grads_with_norm_(run.model.parameters(), settings.grad_clip, gradient_norm)
        run.scaler.step(optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()
    return loss, gradient_norm


def is_to_be_made(run: Run, loss: Tensor, gradient_norm: Tensor, step: int) -> bool:
    """Whether an update is sound; one that is not is left out as often as the settings allow.

    A GPU is asked only where the answer is logged or updates may be left out, since asking makes it wait.

    Raises:
        UserError: it is not sound, and no more may be left out.
    """
    settings, logged = run.settings, is_due(step + 1, run.settings.log_interval, run.settings.max_iters)
    if not (loss.device.type == "cpu" or logged or settings.skip_nonfinite):
        return True
    # A loss scaler finds its scale by trying, and leaves out itself the updates whose gradients overflow.
    values = [loss.item()] if run.scaler.is_enabled() else [loss.item(), gradient_norm.item()]
    if all(map(math.isfinite, values)):
        return True
    run.progress.skipped += 1
    if run.progress.skipped > settings.skip_nonfinite:
        run.progress.step = step + 1
        raise run.divergence(f"the loss is {loss.item()}, the gradient's norm {gradient_norm.item()}")
    return False


def dropout_seed(seed: int, step: int, micro_step: int) -> int:
    """Dropout, too, is a function of where the run is, so that a resumed run drops what it would have dropped."""
    return int(np.random.SeedSequence([seed, step, micro_step]).generate_state(1, np.uint64)[0] >> 1)


def is_due(step: int, interval: int, max_iters: int) -> bool:
    """Whether what happens every so many updates, and after the last one, happens after this one."""
    return step % interval == 0 or step == max_iters


def record_update(run: Run, tracker: Tracker, batches: TrainingBatches, loss: float, gradient_norm: float) -> None:
    """Write down one update; numbers that are not finite have no place in JSON."""
    step = run.progress.step
    speed = tracker.updates_per_second(step) * batches.tokens_per_step
    utilisation = None if run.peak_flops is None else speed * run.model.config.operations_per_token / run.peak_flops
    tracker.record(
        step,
        loss=loss if math.isfinite(loss) else None,
        gradient_norm=gradient_norm if math.isfinite(gradient_norm) else None,
        learning_rate=learning_rate_at(step - 1, run.settings),
        tokens_per_second=round(speed),
        **({} if utilisation is None else {"mfu": utilisation}),
        **({"skipped": run.progress.skipped} if run.progress.skipped else {}),
        tokens=step * batches.tokens_per_step,
    )
    tracker.show(loss, speed, utilisation)


def take_stock(run: Run, tracker: Tracker, dtype: torch.dtype, facts: dict[str, str]) -> None:
    """See how good the model is, save it, and show both."""
    evaluation = validate(run, tracker, dtype)
    if run.settings.sample_tokens and (distributed.is_first() or run.is_shared):
        tracker.record_sample(run.progress.step, sample_text(run, dtype))
    run.save(evaluation)
    if run.settings.report and distributed.is_first():
        page = lambda: write_run_page(run.out_dir, run.settings, facts)  # noqa: E731
        if tracker.attempt("loss.png and report.html", page):
            tracker.log_picture(run.progress.step)
    tracker.restart_clock(run.progress.step)


def sample_text(run: Run, dtype: torch.dtype) -> str:
    """What the model writes now, begun as a document begins; the same random numbers every time.

    In float32, but for a model that processes share, whose weights come in the precision of the matrix products.

    Raises:
        UserError: the weights are broken.
    """
    tokenizer, count = run.data.tokenizer, run.settings.sample_tokens
    start = torch.tensor([[start_of_document(tokenizer, run.data.metadata.documents)]], device=run.model.device)
    next_logits = NextLogits(run.model, 1, positions=1 + count, quick=False)
    temperature = SampleSettings.model_fields["temperature"].default
    tokens = generate(run.model, start, count, temperature=temperature, seed=run.settings.seed, next_logits=next_logits)
    try:
        with autocast(run.model.device, dtype if run.is_shared else torch.float32):
            return "".join(stream_text((int(token) for token in tokens), tokenizer))
    except FloatingPointError as error:
        raise run.divergence(str(error)) from None


def validate(run: Run, tracker: Tracker, dtype: torch.dtype) -> Evaluation | None:
    """One full pass over the validation tokens, recorded; None where there are none.

    Raises:
        UserError: the loss is not finite.
    """
    tokens = run.data.validation
    if not len(tokens):
        return None
    result = evaluate_tokens(run.model, tokens, run.data.tokenizer, dtype, batch_size=run.settings.batch_size)
    if not math.isfinite(result.loss):
        raise run.divergence(f"the validation loss is {result.loss}")
    tracker.record(
        run.progress.step,
        val_loss=result.loss,
        val_perplexity=result.perplexity,
        val_bits_per_byte=result.bits_per_byte,
        val_tokens=result.tokens,
    )
    tracker.say(
        f"step {run.progress.step:,}: validation loss {result.loss:.4f}, perplexity {result.perplexity:.2f}, "
        f"{result.bits_per_byte:.4f} bits per byte, over {result.tokens:,} tokens"
    )
    return result


def leave(run: Run, tracker: Tracker, signal_number: int | None) -> None:
    """Say how the run ended and how to use it; when it was interrupted, save first and exit 128 + signal."""
    done, settings = run.progress.step, run.settings
    go_on = f"python train.py --out_dir={shlex.quote(str(run.out_dir))} --resume"
    if signal_number is not None:
        run.save()
        tracker.say(f"interrupted after step {done:,} and saved; go on with: {go_on}")
        distributed.wait_for_all()
        sys.exit(128 + signal_number)
    if run.patience_is_over and done < settings.max_iters:
        tracker.say(f"stopped early at step {done:,}: {settings.patience} validations without a better one")
    if run.progress.skipped:
        tracker.say(f"{run.progress.skipped} of the updates had no finite loss or gradient and were left out")
    best = run.out_dir / "best.pt"
    if best.exists():
        tracker.say(f"best validation loss {run.progress.best_loss:.4f} ({best})")
    tracker.say(f"sample from it with: python sample.py --out_dir={shlex.quote(str(run.out_dir))}")


def summary(run: Run, batches: TrainingBatches, hardware: str) -> dict[str, str]:
    """What is about to be trained, on what, where, and what to expect of the first loss."""
    settings, config, meta = run.settings, run.model.config, run.data.metadata
    processes = distributed.world_size()
    several = "" if processes == 1 else f"{processes} processes ({settings.parallel}), the first on "
    total = settings.max_iters * batches.tokens_per_step
    padded = f", padded to {config.padded_vocab_size:,}" if config.padded_vocab_size > config.vocab_size else ""
    validation = f"{meta.val_tokens:,} for validation" if meta.val_tokens else "none for validation: evaluation is off"
    resumed = f", {run.progress.step:,} of them done" if run.progress.step else ""
    return {
        "model": f"{run.model.parameter_count():,} parameters: {config.n_layer} layers, {config.n_head} heads, "
        f"width {config.n_embd}, context {config.block_size}; {config.attention_impl} attention, "
        f"{config.norm_placement}-norm, {config.position} positions",
        "data": f"{meta.source}: {meta.train_tokens:,} tokens to train on, {validation}; "
        f"{meta.tokenizer} vocabulary of {config.vocab_size:,}{padded}",
        "training": f"{settings.max_iters:,} updates of {batches.tokens_per_step:,} tokens{resumed}: {total:,} "
        f"tokens, {total / meta.train_tokens:.2f} passes over the data; {settings.optimizer}, "
        f"compile {settings.compile}",
        "device": several + hardware,
        "software": f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}",
        "first loss": f"about ln({config.vocab_size:,}) = {math.log(config.vocab_size):.2f}, that of guessing",
        "run": str(run.out_dir),
    }


if __name__ == "__main__":
    run_command(main)
