"""Tokenizer and chat template, EOS tokens in every spelling, and files of prompts."""

import json
import shutil
from contextlib import suppress

import pytest

from model.errors import InputError
from model.prompts import Tokenizer, eos_ids, from_user, read_prompts


def test_chat_template_gives_plain_ids_up_to_the_reply(tiny):
    tokenizer = Tokenizer.open(tiny)
    ids = tokenizer.encode([*from_user("Who goes there?"), {"role": "assistant", "content": "A friend."}])
    assert all(type(token) is int for token in ids)
    whole = (
        "<｜begin▁of▁sentence｜><｜User｜>Who goes there?<｜Assistant｜>A friend.<｜end▁of▁sentence｜><｜Assistant｜>"
    )
    assert tokenizer.tokens.decode(ids) == whole
    assert tokenizer.decode(ids) == "Who goes there?A friend."
    assert tokenizer.eos == {1}


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 1}, {5}),
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 1}, {5, 6}),
        ({}, {"eos_token_id": [1, 2]}, {1, 2}),
        (None, {"eos_token_id": 0}, {0}),
        (None, {"eos_token_id": None}, set()),
    ],
)
def test_eos_of_the_generation_config_come_first(tmp_path, generation, config, expected):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert eos_ids(tmp_path) == expected


def test_eos_of_the_tokenizer_where_the_configs_name_none(tiny, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, tmp_path)
    assert Tokenizer.open(tmp_path).eos == {1}


def test_tokenizer_that_is_missing_or_has_no_template_is_named(tiny, tmp_path):
    with pytest.raises(InputError, match=f"{tmp_path}: its tokenizer cannot be loaded"):
        Tokenizer.open(tmp_path)
    shutil.copy(tiny / "tokenizer.json", tmp_path)
    settings = json.loads((tiny / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=f"{tmp_path}: its tokenizer has no chat template"):
        Tokenizer.open(tmp_path)


def without_weights(tiny, checkpoint):
    """A copy of what a tokenizer is made of."""
    shutil.copytree(tiny, checkpoint, ignore=shutil.ignore_patterns("*.safetensors*"))
    return checkpoint


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("generation_config.json", "{", "generation_config.json: is not valid JSON"),
        ("generation_config.json", "[]", "generation_config.json: is not a JSON object"),
        ("tokenizer.json", '{"version":"1.0"}', "its tokenizer cannot be loaded: "),
        ("tokenizer.json", "[", "its tokenizer cannot be loaded: "),
        ("tokenizer_config.json", "[]", "its tokenizer cannot be loaded: "),
    ],
)
def test_damaged_files_are_named_in_one_line(tiny, tmp_path, name, text, problem):
    checkpoint = without_weights(tiny, tmp_path / "checkpoint")
    (checkpoint / name).write_text(text)
    with pytest.raises(InputError) as caught:
        Tokenizer.open(checkpoint)
    [line] = caught.value.problems
    assert problem in line
    assert str(checkpoint) in line
    assert "\n" not in line


@pytest.mark.parametrize("value", ["</s>", [1, "</s>"], [], True, 1.0, -1, {"id": 1}])
def test_eos_that_are_no_token_ids_are_refused(tmp_path, value):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(InputError) as caught:
        eos_ids(tmp_path)
    assert caught.value.problems == (
        f"{tmp_path / 'config.json'}: eos_token_id = {value!r} is neither a token id nor a list of some",
    )


def test_a_checkpoint_that_names_no_eos_is_refused(tiny, tmp_path):
    shutil.copy(tiny / "tokenizer.json", tmp_path)
    settings = json.loads((tiny / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=f"^{tmp_path}: names no EOS token, so that no reply would end"):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('Only user and assistant') }}", "Only user and assistant"),
        ("{% if messages %}", "Unexpected end of template"),
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate str"),
        ("{{ nothing.there }}", "'nothing' is undefined"),
    ],
)
def test_prompts_that_the_chat_template_does_not_take_are_numbered(tiny, template, reason):
    tokenizer = Tokenizer.open(tiny)
    tokenizer.tokens.chat_template = "{% if messages[0]['content'] == 'bad' %}" + template + "{% endif %}good"
    if template != "{% if messages %}":
        assert tokenizer.encode_all([from_user("a")]) == [tokenizer.tokens.encode("good", add_special_tokens=False)]
    with pytest.raises(InputError) as caught:
        tokenizer.encode_all([from_user("bad"), from_user("bad")])
    assert [line.split(": ")[:2] for line in caught.value.problems] == [
        ["prompt 1", "the chat template cannot be used for it"],
        ["prompt 2", "the chat template cannot be used for it"],
    ]
    assert all(reason in line for line in caught.value.problems)


def test_code_of_a_tokenizer_runs_only_when_trusted(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "checkpoint", ignore=shutil.ignore_patterns("*.safetensors"))
    checkpoint = tmp_path / "checkpoint"
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(settings))
    (checkpoint / "own.py").write_text(
        "import pathlib\nfrom transformers import PreTrainedTokenizerFast\n"
        f"pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    with suppress(InputError):  # whether it is refused, or loaded without its code, is transformers' affair
        Tokenizer.open(checkpoint)
    assert not (tmp_path / "ran").exists()
    assert Tokenizer.open(checkpoint, trust_remote_code=True).eos == {1}
    assert (tmp_path / "ran").exists()


def test_a_text_file_holds_a_prompt_a_line(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text('Who goes there?\n\n  {"prompt": 1}\n')
    assert read_prompts(file) == [from_user("Who goes there?"), from_user('  {"prompt": 1}')]


def test_only_line_feeds_end_a_line(tmp_path):
    texts = ["a\u2028b", "c\u0085d", "e\x0cf", "g\x1ch", "i\x0bj"]
    plain = tmp_path / "prompts.txt"
    plain.write_bytes("\ufeff".encode() + "\r\n".join(texts).encode())
    assert read_prompts(plain) == [from_user(text) for text in texts]
    lines = tmp_path / "prompts.jsonl"
    entries = [{"prompt": text} for text in texts]
    lines.write_text("\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries), encoding="utf-8-sig")
    assert read_prompts(lines) == [from_user(text) for text in texts]


def test_json_lines_hold_prompts_or_messages(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "Who\ngoes?"}) + "\n\n" + json.dumps({"messages": messages}) + "\n")
    assert read_prompts(file) == [from_user("Who\ngoes?"), messages]


def test_lines_that_cannot_be_used_are_numbered(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "good"}\n{"prompt": 1}\n\n[]\n{"messages": []}\n{"messages": [{"role": "user"}]}\n{\n')
    with pytest.raises(InputError) as caught:
        read_prompts(file)
    assert [problem.split(": ")[0] for problem in caught.value.problems] == [f"{file}:{n}" for n in (2, 4, 5, 6, 7)]


def test_files_without_prompts_are_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(InputError, match="holds no prompt"):
        read_prompts(tmp_path / "empty.txt")
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path / "missing.txt")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path / "bytes.txt")
