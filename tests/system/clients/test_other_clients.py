"""LangChain, LiteLLM and instructor drive the server: schemas, tools, streams (make test-clients).

They need another openai package than the other tests, so they lie in a folder of their own, and
each runs in its own process.
"""

import importlib.machinery
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / ".cache" / "clients"
HEAD = """
import json, sys
from typing import Literal
from pydantic import BaseModel, ConfigDict, Field

class Forecast(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=1, le=9)

base, model = sys.argv[1:]
limits = {"temperature": 0, "max_tokens": 64}
"""
LANGCHAIN = """
from langchain_openai import ChatOpenAI

def forecast(city: Literal["Paris", "Oslo"]) -> str:
    "The weather of a city."
    return ""

chat = ChatOpenAI(base_url=base + "/v1", api_key="x", model=model, **limits)
bound = chat.with_structured_output(Forecast, method="json_schema")
answer = bound.invoke("Weather?")
text = "".join(piece.content for piece in chat.stream("Hello"))
choice = {"tool_choice": "required", "parallel_tool_calls": False}
(call,) = chat.bind_tools([forecast], **choice).invoke("Weather in Oslo?").tool_calls
told = {"name": call["name"], "city": call["args"]["city"]}
print(json.dumps({"answer": answer.model_dump(), "text": text, "call": told}))
"""
LITELLM = """
import litellm

given = {"model": "hosted_vllm/" + model, "api_base": base + "/v1", "api_key": "x", **limits}
given["messages"] = [{"role": "user", "content": "Hello"}]
schema = {"name": "forecast", "schema": Forecast.model_json_schema()}
kind = {"type": "json_schema", "json_schema": schema}
whole = litellm.completion(**given, response_format=kind)
answer = Forecast.model_validate_json(whole.choices[0].message.content)
pieces = litellm.completion(**given, stream=True)
text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
print(json.dumps({"answer": answer.model_dump(), "text": text}))
"""
INSTRUCTOR = """
import instructor
import openai

stock = openai.OpenAI(base_url=base + "/v1", api_key="x")
given = {"model": model, "response_model": Forecast, "max_retries": 0, **limits}
given["messages"] = [{"role": "user", "content": "Weather?"}]
modes = instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS
clients = [instructor.from_openai(stock, mode=mode) for mode in modes]
answers = [client.chat.completions.create(**given) for client in clients]
assert len(answers) == 2
print(json.dumps({"answer": answers[0].model_dump(), "other": answers[1].model_dump()}))
"""
SCRIPTS = {"langchain_openai": LANGCHAIN, "litellm": LITELLM, "instructor": INSTRUCTOR}


def if_installed(package: str):
    there = importlib.machinery.PathFinder.find_spec(package, [str(FOLDER)]) is not None
    reason = f"{package} is not installed: make test-clients"
    return pytest.param(package, marks=pytest.mark.skipif(not there, reason=reason))


@pytest.mark.parametrize("package", [if_installed(package) for package in SCRIPTS])
def test_client(server, adapters, tmp_path, package):
    script = tmp_path / "script.py"
    script.write_text(HEAD + SCRIPTS[package])
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": str(FOLDER)}
    command = [sys.executable, "-P", str(script), server, adapters[0]]
    env = os.environ | offline
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    for name in ("answer", "other"):
        answer = told.get(name, told["answer"])
        assert answer["city"] in ("Paris", "Oslo")
        assert 1 <= answer["days"] <= 9
    assert told.get("text") != ""
    if "call" in told:
        assert told["call"]["name"] == "forecast"
        assert told["call"]["city"] in ("Paris", "Oslo")
