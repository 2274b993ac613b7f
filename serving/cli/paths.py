"""Checks of the files and folders that the command line names. No jax.

Found out before anything is loaded, and told to the operator with the whole path.
"""

from pathlib import Path

from lora_jax.adapters.reader import CONFIG_FILES
from serving.api.generation_config import FILE, FROM_MODEL, NONE
from serving.cli.options import Options

_TLS = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs")


def check_paths(options: Options) -> None:
    """Raise ValueError naming the flag and the path for the first one that leads nowhere."""
    engine = options.engine
    _folder("the model", engine.model, ("config.json",))
    if engine.lora_dir is not None:
        _folder("--lora-dir", engine.lora_dir)
    if options.functions.functions is not None:
        _folder("--functions", options.functions.functions)
    for module in options.adapters:
        _folder(f"--lora-modules {module.name}", module.path, CONFIG_FILES)
    if engine.generation_config not in (FROM_MODEL, NONE):
        _folder("--generation-config", engine.generation_config, (FILE,))
    if engine.chat_template is not None:
        _file("--chat-template", engine.chat_template)
    if options.cluster.nodes_secret_file is not None:
        _file("--nodes-secret-file", options.cluster.nodes_secret_file)
    if options.provision is not None:
        _file("--provision", options.provision)
    for name in _TLS:
        if name in options.uvicorn:
            _file(f"--{name.replace('_', '-')}", options.uvicorn[name])


def _folder(what: str, given: str, holding: tuple[str, ...] = ()) -> None:
    """Check a folder, and that it holds one of the files if any are named."""
    path = Path(given).absolute()
    if not path.is_dir():
        kind = "is a file" if path.exists() else "does not exist"
        hint = "give a folder of this machine, nothing is downloaded"
        raise ValueError(f"{what}: {path} {kind}; {hint}")
    if holding and not any((path / name).is_file() for name in holding):
        raise ValueError(f"{what}: {path} has no {' or '.join(holding)}")


def _file(what: str, given: str) -> None:
    path = Path(given).absolute()
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"{what}: {path} {kind}; give a file of this machine")
