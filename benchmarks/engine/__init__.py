"""Runs one SGLang engine for one benchmark run after another, with hooks of its own (`Options.extra_hooks`)."""
