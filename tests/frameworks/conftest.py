"""Hugging Face's libraries, which read this as they are imported: no network, and a cache of the tests' own."""

import atexit
import os
import shutil
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="kfuse-tests-")
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
# Services that record trainings: nothing is sent anywhere.
os.environ |= {"WANDB_MODE": "offline", "MLFLOW_DISABLE_TELEMETRY": "true"}
os.environ["TRACKIO_DIR"] = f"{os.environ['HF_HOME']}/trackio"
