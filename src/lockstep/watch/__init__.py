"""Where every rank is when none goes on, and whether replicas are still equal."""
