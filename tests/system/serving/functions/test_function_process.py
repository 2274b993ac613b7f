"""A function whose engine dies: its caller is told why, and the next process has more memory."""

import contextlib
import functools
import socket
import threading

import jax
import pytest
from support.processes.server_process import ROOT

from lora_jax.memory.host import HostMemory
from lora_jax.memory.wire import close_all, send_fds, send_header
from lora_jax.models.shared_weights import load_into_arena
from serving.api.sampling import Sampling
from serving.functions import function_process, rehearsal
from serving.functions.handle import Function, FunctionDied
from serving.functions.processes import expect
from serving.functions.program_maker import EXTRA_BYTES, ProgramMaker
from serving.functions.running import Running
from serving.steps.model_runner import ModelRunner

MODEL = str(ROOT / "assets" / "stories260k")
FEW = Sampling(temperature=0, max_tokens=4, ignore_eos=True)


class Functions:
    """Launches a function's life on a thread, and makes steps in the first one fail."""

    def __init__(self, error):
        _, _, self.arena = load_into_arena(MODEL, HostMemory())
        self._fds, self._error = self.arena.export(), error
        self.extra_bytes, self._threads, self._left = [], [], []
        self.maker = ProgramMaker(self._launch, socket.socket.close)

    def start(self) -> Running:
        order = {"name": "f", "adapter": None}
        running = Running(*self.maker.start(order, {}, compiles=True))
        running.on_lack = functools.partial(self.maker.lacked, None)
        return running

    def dispatch(self, dispatch, runner, *plan):
        """Stand in for ModelRunner.dispatch."""
        if len(self.extra_bytes) == 1:
            raise self._error
        return dispatch(runner, *plan)

    def _launch(self, order, programs):
        ours, theirs = socket.socketpair()
        self.extra_bytes.append(order["extra_bytes"])
        fields = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "structured_outputs": False}
        order |= {"model": MODEL, "fields": fields, "device": "cpu"}
        self._threads.append(threading.Thread(target=self._live, args=(theirs,)))
        self._threads[-1].start()
        send_header(ours, order | {"manifest": self.arena.manifest.fields()})
        send_fds(ours, self._fds)
        return ours, len(self.extra_bytes), expect(ours, "ready", 0)

    def _live(self, connection) -> None:
        with connection:
            function_process.main(connection)
        self._left.append(connection)

    def close(self) -> int:
        """Return how many functions have ended by themselves."""
        for thread in self._threads:
            thread.join(60)
        close_all(self._fds)
        return len(self._left)


@pytest.mark.parametrize(
    ("text", "extra_bytes", "words"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory", EXTRA_BYTES[:2], "ran out of the device memory"),
        pytest.param("INTERNAL: a fault", (0, 0), "ended during the call", marks=pytest.mark.long),
    ],
    ids=["out of memory", "a fault"],
)
def test_a_function_whose_engine_died_in_a_call_answers_the_next_one(
    text, extra_bytes, words, monkeypatch
):
    """Its process would refuse every call if it stayed, and run out again in the same bytes."""
    monkeypatch.setattr(function_process, "_shut_others_out", lambda: None)  # it is for good
    monkeypatch.setattr(function_process.xla_memory, "is_bounded", lambda: True)
    monkeypatch.setattr(rehearsal, "QUIET_S", 60.0)
    functions = Functions(jax.errors.JaxRuntimeError(text))
    real = ModelRunner.dispatch
    monkeypatch.setattr(
        ModelRunner, "dispatch", lambda runner, *plan: functions.dispatch(real, runner, *plan)
    )
    with contextlib.ExitStack() as undo:
        function = undo.enter_context(Function("f", functions.start))
        with pytest.raises(FunctionDied, match=f"'f' {words}.*try it again"):
            function.generate("Once", FEW)
        (output,) = function.generate("Once", FEW)
        assert len(output.outputs[0].token_ids) == FEW.max_tokens
        assert tuple(functions.extra_bytes) == extra_bytes
    assert functions.close() == 2
