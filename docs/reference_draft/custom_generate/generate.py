"""An exported folder holds this file as ``custom_generate/generate.py``. transformers runs it for

    model.generate(**inputs, custom_generate=FOLDER, draft=FOLDER, trust_remote_code=True)

where FOLDER is that folder. The package specvocab must be installed.
"""

from specvocab_model.serving.hf_generate import generate

__all__ = ["generate"]
