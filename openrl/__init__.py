"""OpenRL: a self-hosted post-training service for language models."""
