"""Faster compiling: calls without hooks are traced as calls of ``forward``, modules that are alike only once, and modes that
compute the same share a joint trace."""
