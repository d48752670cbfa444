"""Pictures and pages to look at: of a run, of several, of a comparison, of attention."""
