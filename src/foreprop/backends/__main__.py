"""What a server or relay process runs: see `backends.main`."""

import gc
import importlib
import sys

gc.disable()  # until all is imported: what that makes stays, and to look for garbage takes a third
sys.exit(importlib.import_module("foreprop.backends.main").main())
