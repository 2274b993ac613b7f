"""Ablation of disaggregation; see __main__."""
