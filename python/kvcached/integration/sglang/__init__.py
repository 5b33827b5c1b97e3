"""SGLang: one file a seam. See docs/ARCHITECTURE.md."""
