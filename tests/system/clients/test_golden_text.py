"""stories260K, served over HTTP, writes the text that its author published."""

from support.processes.server_process import ROOT, post, serve


def test_greedy_text_from_an_empty_prompt_is_the_published_one(tmp_path):
    golden = (ROOT / "tests" / "golden" / "stories260k_greedy.txt").read_text().strip()
    one_program = [
        "--max-num-seqs",
        "8",
        "--max-num-batched-tokens",
        "8",
        "--no-structured-outputs",
    ]
    model = str(ROOT / "assets" / "stories260k")
    with serve(model, *one_program, log=tmp_path / "log.txt") as url:
        body = {"model": "stories260k", "prompt": "", "max_tokens": 256, "temperature": 0}
        text = post(f"{url}/v1/completions", body)["choices"][0]["text"].strip()
    assert len(golden) > 500
    assert text.startswith(golden)
