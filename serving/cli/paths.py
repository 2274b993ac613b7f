"""Checks of the files and folders that the command line names. No jax.

Found out before anything is loaded, and told to the operator with the whole path.
"""

import contextlib
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lora_jax import hub_folder, strict_json
from lora_jax.adapters.reader import CONFIG_FILES
from lora_jax.config import quantization_section
from serving.api.generation_config import FILE, FROM_MODEL, NONE
from serving.cli.options import Options
from serving.text.tokenizer_files import inline_template

_TLS = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs")


def check_paths(options: Options) -> None:
    """Raise ValueError naming the flag and the path for the first one that leads nowhere."""
    engine = options.engine
    _model(engine.model)
    if options.quantization not in (None, "", "none", "None"):
        _quantization(engine.model, options.quantization)
    if options.cluster.nodes_secret_file is not None:
        _file("--nodes-secret-file", options.cluster.nodes_secret_file)
    if options.cluster.follows:  # the other files are rank 0's
        return
    if engine.lora_dir is not None:
        _folder_of_adapters("--lora-dir", engine.lora_dir)
    if options.functions.functions is not None:
        _folder_of_adapters("--functions", options.functions.functions)
    for module in options.adapters:
        _adapter(f"--lora-modules {module.name}", module.path)
    if engine.generation_config not in (FROM_MODEL, NONE):
        _folder("--generation-config", engine.generation_config, (FILE,))
    if engine.chat_template is not None and inline_template(engine.chat_template) is None:
        _file("--chat-template", engine.chat_template)
    if options.provision is not None:
        _file("--provision", options.provision)
    for name in _TLS:
        if name in options.uvicorn:
            _file(_flag(name), options.uvicorn[name])
    _certificate(options.uvicorn)


def _model(given: str) -> None:
    """Check the folder of the base model, and that it is no adapter's."""
    path = Path(given).absolute()
    if _is_adapter(path) and not (path / "config.json").is_file():
        raise ValueError(
            f"the model: {path} is an adapter; give the folder of its base model, and the adapter "
            f"as --lora-modules NAME={given}"
        )
    _folder("the model", given, ("config.json",))


def _adapter(what: str, given: str) -> None:
    """Check the folder of an adapter, and that it is no model's."""
    path = Path(given).absolute()
    if (path / "config.json").is_file() and not _is_adapter(path):
        raise ValueError(
            f"{what}: {path} is a model; give the folder of an adapter, which has "
            f"{' or '.join(CONFIG_FILES)}"
        )
    wanted = "give NAME=FOLDER with a folder of this machine, nothing is downloaded"
    _folder(what, given, CONFIG_FILES, wanted)


def _quantization(model: str, wanted: str) -> None:
    """Check that config.json names the format of --quantization, by vLLM's names of them."""
    try:
        config = strict_json.loads((Path(model) / "config.json").read_text())
        section = quantization_section(config if isinstance(config, dict) else {}, model)
    except ValueError:
        return  # the engine says what is wrong with it
    method = section.raw.get("quant_method")
    plain = wanted.removesuffix("_marlin").removeprefix("gpt_oss_")
    if plain == method:
        return
    if method is not None:
        raise ValueError(
            f"--quantization {wanted}: config.json says {method}; leave the flag out, the server "
            "reads the format there"
        )
    raise ValueError(
        f"--quantization {wanted}: config.json of {model} names no quantisation; "
        "python -m lora_jax.quantize writes a quantised folder, which needs no flag"
    )


def _folder(
    what: str,
    given: str,
    holding: tuple[str, ...] = (),
    wanted: str = "give a folder of this machine, nothing is downloaded",
) -> None:
    """Check a folder, and that it holds one of the files if any are named."""
    path = Path(given).absolute()
    if not path.is_dir():
        kind = "is a file" if path.exists() else "does not exist"
        raise ValueError(f"{what}: {path} {kind}; {wanted}{hub_folder.hint(given)}")
    if holding and not any((path / name).is_file() for name in holding):
        raise ValueError(f"{what}: {path} has no {' or '.join(holding)}{hub_folder.hint(given)}")


def _folder_of_adapters(what: str, given: str) -> None:
    """Check a folder whose folders are adapters: one that is an adapter itself has none."""
    _folder(what, given)
    path = Path(given).absolute()
    if _is_adapter(path) and not any(map(_is_adapter, path.iterdir())):
        raise ValueError(
            f"{what}: {path} is one adapter, and none is below it; give the folder that holds it, "
            f"{path.parent}"
        )


def _is_adapter(path: Path) -> bool:
    return any((path / name).is_file() for name in CONFIG_FILES)


def _file(what: str, given: str) -> None:
    path = Path(given).absolute()
    if not path.is_file():
        other = "is no regular file" if path.exists() else "does not exist"
        kind = "is a folder" if path.is_dir() else other
        raise ValueError(f"{what}: {path} {kind}; give a file of this machine")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class _HasPassphrase(Exception):
    """The key is encrypted: uvicorn asks the operator for the pass phrase."""


def _certificate(given: Mapping[str, Any]) -> None:
    """Check that certificate and key are there and fit, where a flag asks for TLS."""
    asking = [name for name in (*_TLS, "ssl_cert_reqs", "ssl_ciphers") if given.get(name)]
    if not asking:
        return
    if "ssl_certfile" not in given:  # without it uvicorn would end, or answer without TLS
        raise ValueError(f"{_flag(asking[0])} needs the certificate too: add --ssl-certfile FILE")
    certificate, key = given["ssl_certfile"], given.get("ssl_keyfile")

    def ask() -> str:
        raise _HasPassphrase

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if given.get("ssl_ca_certs"):
        with _naming(f"--ssl-ca-certs {given['ssl_ca_certs']}", "certificates in PEM format"):
            context.load_verify_locations(given["ssl_ca_certs"])
    if given.get("ssl_ciphers"):
        with _naming(f"--ssl-ciphers {given['ssl_ciphers']}", "ciphers in OpenSSL's format"):
            context.set_ciphers(given["ssl_ciphers"])
    files = f"{certificate} and --ssl-keyfile {key}" if key else certificate
    wanted = "a certificate in PEM format and the key that it was made for"
    with contextlib.suppress(_HasPassphrase), _naming(f"--ssl-certfile {files}", wanted):
        context.load_cert_chain(certificate, key, ask)


@contextlib.contextmanager
def _naming(what: str, wanted: str) -> Iterator[None]:
    """Put flag and file before OpenSSL's reason, and behind it what to give."""
    try:
        yield
    except OSError as error:  # ssl.SSLError too
        # OpenSSL's own reason has none where it found no PEM block.
        reason = getattr(error, "reason", "") if isinstance(error, ssl.SSLError) else error.strerror
        reason = str(reason or "not readable").lower().replace("_", " ")
        raise ValueError(f"{what}: {reason}; give {wanted}") from None
