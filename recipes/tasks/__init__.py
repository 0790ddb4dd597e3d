"""Tasks made from nothing, each with questions by seed and a score of an answer."""
