"""Commands that made and measured the shipped assets, apart from pictures."""
