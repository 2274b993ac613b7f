"""This project's server as a child process, with adapters that random weights stand for."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WAIT_S, GRACE_S = 600.0, 30.0


def write_adapter_configs(folder: Path, count: int, rank: int) -> tuple[str, ...]:
    """Write configs of adapters on every map, and return what `--lora-modules` takes.

    With `--load-format dummy` weights are drawn. Equal configs would be one adapter to the caches,
    so each has an alpha of its own.
    """
    modules = []
    for number in range(count):
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": rank + number,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": TARGETS,
            "base_model_name_or_path": "base",
        }
        own = folder / f"a{number}"
        own.mkdir(parents=True)
        (own / "adapter_config.json").write_text(json.dumps(config))
        modules.append(f"a{number}={own}")
    return tuple(modules)


class Server:
    """A server that runs until `stop`; `start_s` is the time until it was healthy."""

    def __init__(self, model: Path, port: int, flags: list[str], log: Path):
        """RuntimeError, with the end of its log: it did not become healthy.

        Where another server has the port, it would be measured in its place: RuntimeError too.
        """
        self.url, self._log = f"http://127.0.0.1:{port}", log
        if self._is_healthy():
            raise RuntimeError(f"a server answers at {self.url} already: end it, or give --port")
        command = [sys.executable, "-m", "serving.launch", str(model), "--port", str(port)]
        command += ["--served-model-name", "base", "--disable-uvicorn-access-log", *flags]
        begun = time.perf_counter()
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        while not self._is_healthy():
            if self._process.poll() is not None or time.perf_counter() - begun > WAIT_S:
                self.stop()
                raise RuntimeError(f"the server did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.1)
        self.start_s = time.perf_counter() - begun

    @property
    def pid(self) -> int:
        """Process id of the server, or of the front of several."""
        return self._process.pid

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> None:
        """End it and all that it started."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
