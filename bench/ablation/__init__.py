"""What each part of disaggregation brings; see __main__."""
