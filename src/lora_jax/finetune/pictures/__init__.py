"""Training on images: data sets, scenes drawn of them, a tower with a gradient."""
