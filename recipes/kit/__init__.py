"""What recipes share: prompts, training data, groups of answers, a run's beginning and end."""
