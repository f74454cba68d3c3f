"""Fewer bytes for gradients and new values: codecs, as `foreprop.core.codec` describes them."""
