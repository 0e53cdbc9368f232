"""Hugging Face's libraries, which read this as they are imported: no network, and a cache of the tests' own."""

import atexit
import os
import shutil
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="kfuse-tests-")
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
