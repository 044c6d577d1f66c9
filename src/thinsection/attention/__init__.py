"""Attention with a 2-D ALiBi bias that is never built."""
