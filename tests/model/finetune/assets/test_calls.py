"""Records of tool calls: the intent's slots as arguments, and the same with others' values."""

import gzip
import json
import random

import pytest
from support.cases.finetune_cases import write_domain

from lora_jax.finetune.assets import calls
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


def test_the_command_writes_both_parts(tmp_path):
    days = [chr(0x4E00 + n) + chr(0x5E00 + 3 * n) for n in range(60)]
    slots = [{"intent": "Weather-Query", "slots": {"day": day}} for day in days]
    answers = [json.dumps(slot, ensure_ascii=False) for slot in slots]
    pairs = [(f"请问{day}天气如何", answer) for day, answer in zip(days, answers, strict=True)]
    write_domain(tmp_path, "intent", pairs)
    calls.main(["--data", str(tmp_path), "--out", str(tmp_path / "made" / "out")])
    heldout = read_jsonl(tmp_path / "made" / "out" / "heldout.jsonl")
    train = read_jsonl(tmp_path / "made" / "out" / "train.jsonl")
    assert 0 < len(heldout) < 20
    assert len(train) > 60 - len(heldout)  # with calls whose values are others'


def test_only_a_value_that_stands_once_and_in_one_argument_is_changed():
    values = {"to": ["Rom"], "from": ["Oslo"], "n": ["7"]}
    rng = random.Random(0)
    twice = ("Berlin nach Berlin", "Travel", {"from": "Berlin", "to": "Berlin"})
    number = ("zwei Karten", "Travel", {"n": 2, "other": "Karten"})
    assert calls._with_others(twice, values, rng) is None
    assert calls._with_others(number, values, rng) is None
    once = ("nach Berlin", "Travel", {"to": "Berlin"})
    assert calls._with_others(once, values, rng) == ("nach Rom", "Travel", {"to": "Rom"})
