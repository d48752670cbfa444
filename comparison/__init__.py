"""Comparing manual and fused attention: do they agree, which is quicker here, do they learn alike?"""
