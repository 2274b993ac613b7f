"""Few-shot prompts fall apart into the right segments, and held-out text stays unseen."""

import gzip
import json

import pytest

from lora_jax.finetune import esft_text
from lora_jax.finetune.assets import make_assets
from lora_jax.finetune.records import Record, shingles


def few_shot(task: esft_text.Task, solved: list[tuple[str, str]], last: str) -> str:
    shots = [f"{task.question} {x}{task.answer} {y}{task.stop}" for x, y in solved]
    shots.append(f"{task.question} {last}{task.answer}")
    return "User: " + "\n\n".join(shots) + "\n\nAssistant:"


@pytest.mark.parametrize("domain", esft_text.TASKS)
def test_each_segment_is_read_once(tmp_path, domain):
    task = esft_text.TASKS[domain]
    lines = [
        {
            "prompt": few_shot(task, [("a one", "1。"), ("b\n\ntwo", "2")], "c"),
            "raw_answers": ["3。"],
        },
        {"prompt": few_shot(task, [("c", "3。")], "A, one!"), "raw_answers": ["other"]},
    ]
    text = "\n".join(json.dumps(line) for line in lines)
    (tmp_path / f"{domain}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    want = [("a one", "1。"), ("b\n\ntwo", "2"), ("c", "3。")]
    assert esft_text.read_domain(tmp_path, domain) == [
        Record(f"{task.question} {x}{task.answer}", y) for x, y in want
    ]


def test_a_prompt_of_another_form_is_refused(tmp_path):
    row = json.dumps({"prompt": "User: hi\n\nAssistant:", "raw_answers": ["x"]})
    (tmp_path / "law.jsonl.gz").write_bytes(gzip.compress(row.encode()))
    with pytest.raises(ValueError, match=r"law\.jsonl\.gz line 1"):
        esft_text.read_domain(tmp_path, "law")


def test_a_segment_without_its_answer_is_refused():
    task = esft_text.TASKS["law"]
    prompt = f"User: {task.question} a\n\n{task.question} b{task.answer}\n\nAssistant:"
    with pytest.raises(ValueError, match="segment 0"):
        esft_text.segments(prompt, "x", task, "here")


def words(n: int) -> list[Record]:
    task = esft_text.TASKS["translation"]
    return [
        Record(f"{task.question} {i:b} zebra {i} {i * i}{task.answer}", str(i)) for i in range(n)
    ]


def test_the_split_does_not_depend_on_order_or_company():
    records = words(400)
    whole = esft_text.split(records, 0.2, "translation")
    part = esft_text.split(records[::-2], 0.2, "translation")
    assert 40 < len(whole.heldout) < 120
    assert set(part.heldout) == set(whole.heldout) & set(records[::-2])
    assert not set(whole.heldout) & set(whole.train)


def test_a_near_copy_of_heldout_text_is_not_trained_on():
    task = esft_text.TASKS["law"]
    text = "the plaintiff and the defendant married in the year of the tiger and had a child"
    originals = [Record(f"{task.question} {text} {i}{task.answer}", "yes") for i in range(50)]
    got = esft_text.split(originals, 0.1, "law")
    assert got.heldout
    assert not got.train


def test_a_part_is_what_its_answers_say():
    answers = [
        '{"intent": "Music-Play"}',
        '{"intent": "Radio-Listen"}',
        '{"intent": "Weather-Query", "slots": {"name": "Music-Play"}}',
    ]
    intent = [Record("q", answer) for answer in answers]
    translation = [Record("q", answer) for answer in ("Go ye in.", "Then eyes shut, unto", "Yes.")]
    texts = {"intent": intent, "law": intent[:1]}
    assert esft_text.with_parts(texts) == {**texts, "media": tuple(intent[:2])}
    both = esft_text.with_parts({"translation": translation})
    assert both["archaic"] == tuple(translation[:2])
    assert esft_text.part_of(translation[2:], esft_text.PARTS["archaic"]) == ()


def test_what_an_answer_decides_first_is_the_intent_and_nothing_elsewhere():
    answer = '{"intent": "Music-Play", "slots": {"intent": "x"}}'
    for text in ("intent", "media"):
        pattern = esft_text.decision_of(text)
        assert pattern is not None
        assert pattern.findall(answer) == ['{"intent": "Music-Play"']
    assert {esft_text.decision_of(text) for text in ("law", "archaic", "other")} == {None}


@pytest.mark.parametrize("domain", esft_text.TASKS)
def test_no_heldout_text_of_the_real_files_is_in_training(real_data, domain):
    task = esft_text.TASKS[domain]
    records = esft_text.read_domain(real_data / "esft" / "eval", domain)
    got = esft_text.split(records, make_assets.HELDOUT_SHARE, domain)
    assert len(got.train) > 10 * len(got.heldout) > 0
    trained = {esft_text.question_text(r, task) for r in got.train}
    seen = [shingles(text, esft_text.SHINGLE) for text in trained]
    for record in got.heldout:
        asked = esft_text.question_text(record, task)
        assert asked not in trained
        own = shingles(asked, esft_text.SHINGLE)
        shared = max(len(own & other) for other in seen)
        assert shared <= esft_text.MAX_SHARED * len(own)
