"""What the user's next words are taken for, and what is too little to say so."""

from __future__ import annotations

import pytest

from understudy.ingest.signals.feedback import feedback, is_correction, is_cut_off, is_interrupt_note

NEGATIVE = [
    "No, use the other file.",
    "no that's wrong",
    "nope",
    "That's wrong",
    "undo that",
    "Undo.",
    "revert it",
    "please revert your changes",
    "git revert that commit",
    "that didn't work",
    "it still doesn't work",
    "still failing",
    "it's still broken",
    "you broke the build",
    "you forgot the tests",
    "why did you delete the file?",
    "I said not to touch main.py",
    "I didn't ask for that",
    "that's not what I asked for",
    "don't do that",
    "stop",
    "stop doing that",
    "doesn't work",
    "not working",
    "not what i wanted",
    "ok but it still fails",
    "👎",
    "great, but it still fails",
    "thanks but that's wrong",
    "wrong file",
    "roll back",
    "this is not right",
    "The user sent a new message while you were working:\nno, stop it",
    "<bash-input>git checkout -- a.py</bash-input>",
    "you should not have",
    "Nein, das ist falsch",
    "das funktioniert nicht",
    "falsch",
    "mach das rückgängig",
    "non, pas comme ça",
    "ça ne marche pas",
    "no funciona",
    "no, i think this is not right",
    "no i think it should use the other one",
    "no, this is broken",
    "está mal",
    "não funciona",
    "不对",
    "还是不行",
    "撤销",
    "違います",
    "動きません",
    "не работает",
    "still getting the same error",
    "it isn't working",
    "that does not work",
    "Hmm, that's not right",
]

POSITIVE = [
    "thanks",
    "Thanks, that works!",
    "thank you!",
    "perfect",
    "Perfect, now add tests",
    "great job",
    "Great!",
    "nice work",
    "looks good",
    "LGTM",
    "awesome. next: do x",
    "it works now",
    "that works",
    "works great",
    "love it",
    "👍",
    "well done",
    "excellent, please commit",
    "danke",
    "Perfekt, danke!",
    "super!",
    "merci",
    "parfait !",
    "gracias",
    "perfecto",
    "obrigado",
    "谢谢",
    "很好",
    "ありがとう",
    "спасибо",
    "ok great, now push",
    "cool, next",
    "that's exactly what I wanted",
    "that's better",
    "good job",
]

NEITHER = [
    "push to github",
    "no problem, go on",
    "no worries",
    "No I think this is fine",
    "no, then it's good",
    "No, in that case this is fine",
    "no, i think that it's good enough, commit it",
    "No, we're all set",
    "no everything looks good",
    "no need to run tests",
    "add a function that works with dates",
    "the great thing about X is",
    "nice to have: a dark mode",
    "how does it work?",
    "what's wrong with this code?",
    "is it working?",
    "fix the wrong import in a.py",
    "stop the server on port 3000",
    "undo button should be blue",
    "add an undo feature",
    "revert button",
    "now add tests",
    "thanks in advance for fixing this",
    "is that correct?",
    "yes",
    "ok",
    "continue",
    "can you explain why this works",
    "I didn't understand, explain",
    "great expectations is a library we use",
    "No tests are present, add some",
    "The tests are failing in CI, fix them",
    "logread not working",
    "why does it return None?",
    "why are you using sudo? explain",
    "don't use tabs",
    "not sure, you decide",
    "no preference",
    "no",
    "super class needs a method",
    "works on my machine only; investigate",
    "thanks for nothing",
    "cool down timer",
    "notebook is broken, please fix",
    "wrong with",
    "genial software package",
    "das ist gut",
    "это важно",
    "stop hook feedback",
    "resume",
    "no, go on",
    "<command-name>/undo</command-name>",
    "[Request interrupted by user]",
    "thanks " + "x" * 5000,
]


@pytest.mark.parametrize(
    ("expected", "text"),
    [("negative", text) for text in NEGATIVE]
    + [("positive", text) for text in POSITIVE]
    + [(None, text) for text in NEITHER],
)
def test_user_messages_are_classified_as_feedback(expected: str | None, text: str) -> None:
    assert feedback(text) == expected


def test_only_the_interrupt_note_itself_counts_as_an_interruption() -> None:
    assert is_interrupt_note("[Request interrupted by user]") and is_interrupt_note(
        "[Request interrupted by user for tool use]"
    )
    assert is_interrupt_note("<turn_aborted>\nThe user interrupted the previous turn on purpose.")
    assert not is_interrupt_note("why does it say [Request interrupted by user]?")
    assert not is_interrupt_note(
        "[Request interrupted: the session ended before this agent finished. Nobody asked it to stop.]"
    )
    assert is_cut_off("I will\n\n[Response interrupted by user]") and not is_cut_off("done")
    assert is_correction("... To tell you how to proceed, the user said:\nuse npm")
