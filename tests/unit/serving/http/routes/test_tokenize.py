"""/tokenize and /detokenize as vLLM's benches call them."""

import pytest


def test_prompt_to_tokens_and_back(client):
    answer = client.post("/tokenize", json={"model": "sql", "prompt": "hi"}).json()
    assert answer == {
        "count": 3,
        "max_model_len": 64,
        "tokens": [256, 104, 105],
        "token_strs": ["<s>", "h", "i"],
    }
    body = {"model": "sql", "tokens": answer["tokens"]}
    assert client.post("/detokenize", json=body).json() == {"prompt": "hi"}


def test_special_tokens_only_if_wanted(client):
    body = {"prompt": "hi", "add_special_tokens": False}
    assert client.post("/tokenize", json=body).json()["tokens"] == [104, 105]


def test_messages_go_through_the_template(client):
    body = {"messages": [{"role": "user", "content": "yo"}]}
    answer = client.post("/tokenize", json=body).json()
    assert bytes(answer["tokens"]) == b"[user]yo[assistant]"
    body["add_generation_prompt"] = False
    assert bytes(client.post("/tokenize", json=body).json()["tokens"]) == b"[user]yo"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "x", "messages": []}, 400),
        ("/tokenize", {"prompt": 3}, 400),
        ("/tokenize", {"prompt": "x", "model": "nope"}, 404),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": [260]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": ["1"]}, 400),
        ("/detokenize", {"tokens": [1e99]}, 400),
    ],
)
def test_bad_bodies(client, path, body, status):
    assert client.post(path, json=body).status_code == status


def test_an_empty_prompt_has_its_special_tokens_only(client):
    assert client.post("/tokenize", json={"prompt": ""}).json()["tokens"] == [256]


def test_messages_are_templated_as_a_chat_would(client):
    last = {"role": "assistant", "content": "so"}
    body = {"messages": [last], "continue_final_message": True}
    assert bytes(client.post("/tokenize", json=body).json()["tokens"]) == b"[assistant]so"
    body = {"messages": [last], "chat_template_kwargs": {"messages": 1}}
    assert client.post("/tokenize", json=body).status_code == 400
