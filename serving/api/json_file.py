"""A small JSON file of a model's folder. No jax."""

import json
from pathlib import Path
from typing import Any

from lora_jax import strict_json


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a file, empty where there is no file.

    ValueError, naming folder and file, for what is not JSON or no object.
    """
    if not path.is_file():
        return {}
    try:
        data = strict_json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.parent.name}/{path.name} is not JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path.parent.name}/{path.name}: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path.parent.name}/{path.name} must hold an object.")
    return data
