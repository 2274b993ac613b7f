"""Records of tool calls: the intent's slots as arguments, and the same with others' values."""

import gzip
import json

import pytest

from lora_jax.finetune import calls
from lora_jax.finetune.esft_text import TASKS
from lora_jax.finetune.records import Record, read_jsonl

TASK = TASKS["intent"]
SAID = [
    ("明天去上海", "Travel-Query", {"date": "明天", "to": "上海"}),
    ("后天去北京", "Travel-Query", {"date": "后天", "to": "北京"}),
    ("打开空调", "HomeAppliance-Control", {"command": "开机"}),
]


def intent(sentence, name, slots):
    answer = json.dumps({"intent": name, "slots": slots}, ensure_ascii=False)
    return Record(f"{TASK.question} {sentence}{TASK.answer}", answer)


def test_an_intent_becomes_a_call():
    call = calls.call_of(intent(*SAID[0]))
    assert call == SAID[0]
    record = calls.as_record(call)
    assert record.prompt == "明天去上海"
    text = record.answer.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert json.loads(text) == {"name": "Travel-Query", "arguments": SAID[0][2]}
    with pytest.raises(ValueError, match="not an intent"):
        calls.call_of(Record("x", "[]"))


def test_values_change_in_sentence_and_arguments_alike():
    seen = {sentence for seed in range(20) for sentence, _, _ in calls.varied(SAID, seed)}
    assert {"明天去北京", "后天去上海"} <= seen
    for seed in range(9):
        for sentence, _, arguments in calls.varied(SAID, seed):
            assert all(value in sentence for value in arguments.values())
    assert all(name == "Travel-Query" for _, name, _ in calls.varied(SAID, 1)), "开机 is not said"


def test_what_is_held_out_is_not_for_training(tmp_path):
    cities = [chr(0x4E00 + i) + chr(0x5E00 + 3 * i) for i in range(60)]
    said = [intent(f"请问{city}天气如何", "Weather-Query", {"city": city}) for city in cities]
    lines = [
        json.dumps({"prompt": f"User: {r.prompt}\n\nAssistant:", "raw_answers": [r.answer]})
        for r in said
    ]
    with gzip.open(tmp_path / "intent.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    calls.make(tmp_path, tmp_path / "out")
    heldout = read_jsonl(tmp_path / "out" / "heldout.jsonl")
    train = read_jsonl(tmp_path / "out" / "train.jsonl")
    assert len(heldout) > 0
    assert not {r.prompt for r in heldout} & {r.prompt for r in train[: len(said)]}
