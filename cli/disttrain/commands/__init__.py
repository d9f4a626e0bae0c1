"""The verbs' command lines: a function for each, whose signature is its options. What they do is imported in them."""
