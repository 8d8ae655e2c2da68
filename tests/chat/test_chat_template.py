"""Chat templates: prompts are those of transformers, and a template that cannot be trusted or used is refused."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from grailnode import UserError
from grailnode.chat.chat_template import ChatTemplate, ChatTemplateError
from grailnode.chat.inside import rendering
from grailnode.engine.policy import Policy, PolicyError
from grailnode.run import workspace
from grailnode.run.creation import open_run
from protocol.environments import dataset
from roles.policy.assignment import encode_prompt
from tests.support.builders.policies import write_speaking_policy
from tests.support.builders.recipes import demo_recipe
from tests.support.builders.tasks import MATH
from tests.support.processes.command_line import fail, succeed

MARKED = (  # a system prompt of its own where there is none, as Qwen2.5's
    "{%- if messages[0]['role'] == 'system' %}{{- '[s]' + messages[0]['content'] + '<eos>\\n' }}"
    "{%- else %}{{- '[s]Be helpful.<eos>\\n' }}{%- endif %}"
    "{%- for message in messages %}{%- if message.role != 'system' %}"
    "{{- '[' + message.role + ']' + '\\n' + message.content + '<eos>' + '\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '[assistant]\\n' }}{%- endif %}"
)
HEADERS = (  # a first token, trimmed messages and a date for which there may be no clock, as Llama 3's
    "{{- bos_token }}{% if strftime_now is defined and false %}{{ strftime_now('%d') }}{% else %}[1 May]{% endif %}\n"
    "{% for message in messages %}\n"
    "    {% set content = '[' ~ message['role'] ~ ']\\n' ~ message['content'] | trim ~ eos_token %}\n"
    "    {% generation %}{{ content }}{% endgeneration %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
NO_SYSTEM = (  # as Gemma 2's
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}({{ m['content'] | trim }}){% continue %}{% endif %}{% endfor %}"
)
PROMPTS = [problem.prompt for problem in dataset("math", MATH).problems]


def write_template(directory: Path, template: str) -> Policy:
    return write_speaking_policy(directory, ["<solution>4</solution>"], template)


@pytest.mark.parametrize(
    ("template", "system"),
    [(MARKED, ""), (MARKED, "Count."), (HEADERS, ""), (HEADERS, "Think\nfirst. "), (NO_SYSTEM, "")],
    ids=["marked", "marked with a system prompt", "headers", "headers with a system prompt", "no system"],
)
def test_prompts_are_those_of_transformers(tmp_path: Path, template: str, system: str) -> None:
    policy = write_template(tmp_path, template)
    chat = ChatTemplate.read(tmp_path).chat(system, PROMPTS)
    theirs = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<pad>", eos_token="<eos>", chat_template=template
    )
    first = [{"role": "system", "content": system}] if system else []
    for prompt in PROMPTS:
        messages = [*first, {"role": "user", "content": prompt}]
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert encode_prompt(policy.tokenizer, chat, prompt) == tuple(expected)


TURNS = {  # template: text before a reply and behind it, and whether the template changes the past
    "marked": (MARKED, ("\n[user]\n", "<eos>\n[assistant]\n"), False),
    "headers": (HEADERS, ("[user]\n", "<eos>[assistant]"), True),  # later it has a line break behind [assistant]
    "thoughts dropped, as Qwen3's": (
        MARKED.replace("message.content +", "message.content.split('</think>')[-1] +"),
        ("\n[user]\n", "<eos>\n[assistant]\n"),
        True,
    ),
    "a prompt that is written otherwise later": (
        MARKED.replace("'[s]Be helpful.<eos>\\n'", "messages | length ~ '[s]<eos>\\n'"),
        ("\n[user]\n", "<eos>\n[assistant]\n"),
        True,
    ),
}


@pytest.mark.parametrize(("template", "glue", "changes"), TURNS.values(), ids=TURNS)
def test_the_text_around_a_reply_is_that_of_a_conversation_of_two_turns(
    tmp_path: Path, template: str, glue: tuple[str, str], changes: bool
) -> None:
    write_template(tmp_path, template)
    reader = ChatTemplate.read(tmp_path)
    chat, changes_past = reader.with_turns(reader.chat("", ["what?"]), ["<eos>"])
    assert (chat.turn_before, chat.turn_after) == glue
    assert changes_past == changes


def test_a_template_for_one_message_is_refused_for_episodes(tmp_path: Path) -> None:
    write_template(tmp_path, USER)
    reader = ChatTemplate.read(tmp_path)
    with pytest.raises(ChatTemplateError, match="each message of two turns exactly once"):
        reader.with_turns(reader.chat("", ["what?"]), ["<eos>"])


def test_a_template_of_its_own_file_comes_first_and_default_is_one_of_several(tmp_path: Path) -> None:
    write_template(tmp_path, MARKED)
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": HEADERS}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several, "add_bos_token": True}))
    assert ChatTemplate.read(tmp_path).text == HEADERS
    (tmp_path / "chat_template.jinja").write_text(NO_SYSTEM)
    assert ChatTemplate.read(tmp_path).text == NO_SYSTEM
    assert ChatTemplate.read(tmp_path).variables == {}


USER = "{{ messages[-1].content }}"
NESTED_LOOPS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
DOUBLED = "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}" + USER
UPPER = "{{ messages[-1].content | upper | replace('MARKER7391', 'Marker7391') }}"
HOSTILE = {
    "endless loops": (NESTED_LOOPS + USER, "more than"),
    "a text that doubles": (DOUBLED, "MiB of memory"),
    "much output": (f"{{{{ 'a' * {rendering.MAX_CHARACTERS} }}}}" + USER, "more than"),
    "attributes": ("{{ ''.__class__.__mro__ }}" + USER, "SecurityError"),
    "globals of a function": ("{{ raise_exception.__globals__.keys() }}" + USER, "SecurityError"),
    "changes of an argument": ("{{ messages.append(1) }}" + USER, "SecurityError"),
    "imports": ("{% include '/etc/passwd' %}" + USER, "cannot be rendered"),
    "a clock": ("{{ strftime_now('%d') }}" + USER, "'strftime_now' is undefined"),
    "randomness": ("{{ [1, 2] | random }}" + USER, "No filter named 'random'"),
    "bad syntax": ("{% if %}", "TemplateSyntaxError"),
    "a refusal": ("{{ raise_exception('not\nthis') }}", "TemplateError: not this"),
    "no user message": ("hello", "exactly once"),
    "two of them": (USER + USER, "exactly once"),
    "another text": (UPPER, "it changes the prompt"),
}


@pytest.mark.parametrize(("template", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_or_useless_template_is_refused_in_one_line(tmp_path: Path, template: str, message: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja: the chat template cannot be used: ") as raises:
        ChatTemplate.read(tmp_path).chat("", ["what?"])
    assert message in str(raises.value)
    assert "\n" not in str(raises.value)


def test_a_template_that_ignores_the_system_prompt_and_one_without_room_for_it_are_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(USER)
    with pytest.raises(ChatTemplateError, match="leaves the system prompt out"):
        ChatTemplate.read(tmp_path).chat("Count.", [])
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ChatTemplateError, match="shorten the system prompt"):
        ChatTemplate.read(tmp_path).chat("é" * 2049, [])


def test_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="the tokenizer has no chat template"):
        ChatTemplate.read(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(PolicyError, match=r"tokenizer_config\.json: not JSON"):
        ChatTemplate.read(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(PolicyError, match=r"chat_template\.jinja: cannot be read"):
        ChatTemplate.read(tmp_path)


def test_init_pins_the_conversation(tmp_path: Path) -> None:
    policy = write_template(tmp_path / "policy", MARKED)
    (tmp_path / "data.jsonl").write_bytes(MATH)
    (tmp_path / "policy" / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    arguments = ("--policy", policy.directory, "--environment", "math", "--data", tmp_path / "data.jsonl")
    chat = ("--chat", "--system-prompt", "Count.", "--max-tokens", 64)
    succeed("init", *map(str, (tmp_path / "run", *arguments, *chat)))
    run = open_run((tmp_path / "run" / "run.manifest").read_bytes()).record
    assert run.chat is not None
    assert (run.chat.system, run.chat.trim) == ("Count.", False)
    assert run.chat.prompt("1?") == "[s]Count.<eos>\n[user]\n1?<eos>\n[assistant]\n"
    assert run.sampling.stops == (1, 2)
    assert "tokenizer_config.json" in {file.name for file in run.model.files}
    bare = fail("init", *map(str, (tmp_path / "bare", *arguments, "--max-tokens", 64)))
    assert "run `grailnode calibrate` without --chat" in bare
    alone = fail("init", *map(str, (tmp_path / "alone", *arguments, "--system-prompt", "Count.")))
    assert "a system prompt belongs to a conversation" in alone


def test_init_says_that_a_template_changes_earlier_turns_and_pins_the_text_around_replies(tmp_path: Path) -> None:
    policy = str(write_template(tmp_path / "policy", HEADERS).directory)
    command = ("init", str(tmp_path / "run"), "--policy", policy, "--environment", "calculator", "--chat")
    assert "\nthe chat template changes earlier turns: " in succeed(*command, "--numerics", "exact")
    chat = open_run((tmp_path / "run" / "run.manifest").read_bytes()).record.chat
    assert chat is not None and (chat.turn_before, chat.turn_after) == ("[user]\n", "<eos>[assistant]")


def test_a_conversation_that_the_policy_cannot_read_is_refused(tmp_path: Path) -> None:
    policy = write_template(tmp_path / "policy", MARKED)
    for system_prompt, message in (
        ("Zähle.", "has characters that the policy's tokenizer does not know"),
        ("Count. " * 400, "is 2832 tokens long, and with up to 8 tokens behind it the policy has room for"),
    ):
        recipe = demo_recipe(chat=True, system_prompt=system_prompt)
        with pytest.raises(UserError, match=message):
            workspace.create(tmp_path / "run", recipe, policy=policy.directory)
