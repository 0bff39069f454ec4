"""The runtime: one load of a nest, every member on shared weights, many answers at once."""
