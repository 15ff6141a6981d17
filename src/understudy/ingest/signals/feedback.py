"""Judges a turn by the user's next message: praise, correction or interruption. Only plain wordings count."""

from __future__ import annotations

import re
from typing import Literal

_MAX_MESSAGE_CHARS = 4_000
"""A longer message is a new task or pasted text, not a comment on the turn."""
_OPENING = 240
"""How many characters at the beginning of a message are compared with wordings."""

_INTERRUPT_NOTES = ("[Request interrupted by user", "<turn_aborted>")
"""Beginnings of the notes that programs write when the user interrupts the model."""
# Beginnings of messages that programs write in the user's name.
_WRITTEN_BY_PROGRAMS = (
    "<", "[Request interrupted", "Caveat: ", "This session is being continued from a previous conversation",
    "# AGENTS.md", "[TASK RESUMPTION]", "OBSERVATION:", "Base directory for this skill:", "[Image",
)  # fmt: skip
# The program's text before and after a prompt that the user wrote while the model worked.
_QUEUED = re.compile(r"(?:<system-reminder>\s*)?The user sent (?:the following|a new) message[^\n]{0,80}:\s*")
_AFTER_QUEUED = re.compile(r"\n\n(?:IMPORTANT:|Please address this message|This is how Claude Code)")
# The program's reminders in front of a user's text, in the same message.
_OWN_REMINDERS = re.compile(r"(?:<system-reminder>(?:(?!</?system-reminder>)[\s\S])*</system-reminder>\s*)+(?=\S)")
# How such a prompt begins in a tool result, at whose end the program sent it.
_QUEUED_IN_RESULT = "<system-reminder>\nThe user sent "
_CUT_OFF_ENDINGS = ("[Response interrupted by user]", "[Request interrupted by user]")
_REFUSALS_WITH_INSTRUCTIONS = (
    "the user said:\n",
    "The user said:\n",
    "<feedback>",
    "provided the following feedback",
)
# From here on, a message is the program's: what it appended to the user's text.
_REMINDER = "<system-reminder>"

_UNDO_COMMANDS = re.compile(
    r"<bash-input>\s*git\s+(?:revert\b|restore\b|checkout\s+(?:--|\.|HEAD)|reset\s+--hard|stash\b)"
)

# Filler words at the beginning of a message, which are skipped.
_FILLER = re.compile(
    r"(?:(?:ok|okay|hmm+|um+|uh|well(?!\s+done)|oh|ah|hey|and|so|but|claude|please|pls|ugh|wait)\b[,.!…\s]*)*+"
)
_NEGATIVE = re.compile(
    r"""(?:
    no(?=[,.!;:\n—-]+\s*\S|\s+(?:no|that|this|it|you|i|don'?t|stop|not|the)\b)
      (?!\W*(?:worries|problem|need|thank|that'?s\s+(?:ok|fine|good|right|great|all)|it'?s\s+(?:ok|fine|good|all)
         |go\s+(?:on|ahead)|continue|keep|proceed|leave|do\s+it|just|yes|please\s+(?:continue|proceed|go)))
    |nope\b|wrong(?!\s*(?:with|\?))|incorrect\b
    |undo(?:\s+(?:it|this|that|your|the|all|these|those|everything|what)\b|\s*[.,!]|\s*$)
    |(?:git\s+)?revert(?:\s+(?:it|this|that|your|the|all|these|those|everything|what|to)\b|\s*[.,!]|\s*$)
    |roll(?:\s|-)?back\b|put\s+(?:it|that|this)\s+back\b|change\s+(?:it|that)\s+back\b
    |(?:that|this|it)(?:'?s|\s+is|\s+was)\s+(?:still\s+)?
       (?:wrong|incorrect|not\s+(?:right|correct|what|working|it\b|true)|broken|worse|bad\b|terrible|failing)
    |(?:that|this|it)\s+(?:still\s+)?(?:does\s*n[o']?t|did\s*n[o']?t|is\s*n[o']?t|was\s*n[o']?t)\s+
       (?:work|help|fix|right|correct|what|true|do\s+(?:what|anything))
    |(?:(?:it|that|this|they|the\s+(?:tests?|build|error))(?:'?s|\s+is|\s+are)?\s+)?still\s+(?:not\b|broken|fail(?:s|ing)?\b|wrong|does\s*n[o']?t|the\s+same\s+(?:error|problem|issue)|an?\s+error
       |getting\b|seeing\b|errors?\b|crash|have\s+the\s+same)
    |(?:does\s*n[o']?t|did\s*n[o']?t|not)\s+work(?:s|ing|ed)?\b
    |you\s+(?:broke|forgot|missed|misunderst|ignored|did\s*n[o']?t|did\s+not|should\s*n[o']?t\s+have|were\s+not|lied
       |deleted|removed|just\s+(?:broke|deleted|removed)|keep\s)
    |why\s+(?:did|would|are|have)\s+you\s+(?:not\s+)?(?:delet|remov|chang|chose|choose|do\s+that|ignor|break|overwr|creat|add|mak|writ)
    |i\s+(?:said|told\s+you|asked\s+(?:you\s+)?(?:for|to\s+not|not)|did\s*n[o']?t\s+(?:ask|want|say|mean)|never\s+(?:asked|said))
    |(?:do\s*n[o']?t|never)\s+do\s+(?:that|this)\b|stop\b(?=[\s,.!]*(?:$|\n|doing|it\b|that\b|there|adding|making|using))
    |not\s+(?:what\s+i|like\s+that|that\b|correct|right\b|good\b)
    |that\s+broke\b|it\s+broke\b|👎
    # German
    |nein\b(?!,?\s*(?:danke|passt|alles|kein))|falsch\b|(?:das\s+)?(?:ist\s+falsch|stimmt\s+nicht)|(?:das\s+|es\s+)?(?:funktioniert|geht)\s+(?:immer\s+noch\s+|noch\s+)?nicht
    |mach\s+(?:das|es)\s+rückgängig|rückgängig\b
    # French
    |non\s*,|c'est\s+(?:faux|pas\s+(?:ça|bon|correct))|(?:ça|cela)\s+ne\s+(?:marche|fonctionne)\s+(?:toujours\s+)?pas|annule\b
    # Spanish
    |(?:no\s+funciona|sigue\s+sin\s+funcionar|eso\s+(?:está\s+mal|no\s+es)|está\s+mal|incorrecto|deshaz)\b
    # Portuguese
    |(?:não\s+funciona|ainda\s+não\s+funciona|(?:isso\s+)?está\s+errado|errado|desfaça|desfaz)\b
    # Chinese
    |不对|错了|不是这样|不行|还是不|撤销|还原|回滚
    # Japanese
    |違います|違う|間違|動きません|動かない|元に戻して|だめ
    # Korean
    |아니[,.\s]|틀렸|안\s*돼|되돌려
    # Russian
    |нет\s*,|неправильно|неверно|(?:всё\s+ещё\s+)?не\s+работает|отмени\b|откати\b
    )""",
    re.VERBOSE,
)
# A "no" that answers a question of the model and then approves of the work: "No I think this is fine".
_APPROVES = re.compile(
    r"""no\b\W*(?:(?:then|so|in\s+that\s+case|actually|i\s+see)\b\W*)*
    (?:i\s+(?:think|guess|believe|mean|feel)\s+(?:that\s+)?(?=this|that|it|we|you|they|everything|all))?
    (?:this|that|it|we|you|they|everything|all)(?:\s+of\s+(?:it|this|that|them))?
    (?:'s|'re|\s+(?:is|are|looks?|seems?|feels?|sounds?))\s+
    (?:(?:all|already|really|quite|pretty|perfectly|totally|just|very|now)\s+)*
    (?:fine|good|ok|okay|great|perfect|enough|alright|correct|right|sufficient)\b
    |no\b\W*(?:we|you)(?:'re|\s+are)\s+(?:all\s+)?(?:done|set)\b""",
    re.VERBOSE,
)
_POSITIVE = re.compile(
    r"""(?:
    (?:thanks|thank\s+you|thx|ty)\b(?!\s+(?:for\s+nothing|in\s+advance))
    |(?:perfect|excellent|awesome|amazing|brilliant|fantastic|wonderful|great|nice|cool|beautiful|lovely|sweet)
       (?=\s*[,.!:;)\n—–-]|\s*$|\s+(?:job|work|thanks|thank|stuff|one|catch|find|that\s+(?:work|did)|it\s+work|now\b))
    |(?:good|great|nice|excellent|awesome)\s+(?:job|work|stuff|catch|find)\b
    |well\s+done\b|lgtm\b|looks?\s+(?:really\s+|very\s+|pretty\s+)?(?:good|great|perfect|right|correct|nice|amazing)\b
    |(?:that|this|it|everything|all)(?:'?s|\s+is)?\s+(?:now\s+)?(?:works?|worked|working)\b(?!\s*\?)
    |(?:that|this|it)(?:'?s|\s+is|\s+looks)\s+(?:really\s+|very\s+)?(?:perfect|great|excellent|awesome|amazing|exactly|correct|good|right|fixed|better)\b(?!\s+(?:to|if|idea|question))
    |(?:i\s+)?love\s+(?:it|this|that)\b|works\s*(?:!|\.|,|$|now|great|perfectly|well|fine)|👍|🎉|❤
    # German
    |(?:danke|vielen\s+dank|perfekt|super|prima|klasse)(?=\s*[,.!]|\s*$)|(?:das\s+|es\s+)?(?:funktioniert|klappt)(?:\s+jetzt)?(?=\s*[,.!]|\s*$)
    # French
    |(?:merci|parfait|génial|ça\s+marche)(?=\s*[,.!]|\s*$|\s+beaucoup)
    # Spanish
    |(?:gracias|muchas\s+gracias|perfecto|excelente|genial|ya\s+funciona)(?=\s*[,.!]|\s*$)
    # Portuguese
    |(?:obrigad[oa]|muito\s+obrigad[oa]|perfeito|ótimo)(?=\s*[,.!]|\s*$)
    # Chinese
    |谢谢|很好|完美|太好了|太棒|可以了|成功了
    # Japanese
    |ありがとう|完璧|いいですね|動きました|素晴らしい
    # Korean
    |감사합니다|고마워|완벽
    # Russian
    |(?:спасибо|отлично|супер|идеально)(?=\s*[,.!]|\s*$)
    )""",
    re.VERBOSE,
)
_CONTRAST = re.compile(r"\b(?:but|however|except|although|aber|mais|pero|mas|но|only)\b|但是|でも|しかし")


def is_interrupt_note(text: str) -> bool:
    """Return whether a text is the program's note that the user interrupted the model."""
    return text.lstrip().startswith(_INTERRUPT_NOTES)


def is_cut_off(answer: str) -> bool:
    """Return whether a response ends with a note that the user stopped it."""
    return answer[-80:].rstrip().endswith(_CUT_OFF_ENDINGS)


def is_correction(refusal: str) -> bool:
    """Return whether a refusal includes instructions from the user."""
    return any(sign in refusal[:1_000] for sign in _REFUSALS_WITH_INSTRUCTIONS)


def queued_prompts(result: str) -> list[str]:
    """Return the reminders in a tool result that hold prompts written while the model worked."""
    return [_QUEUED_IN_RESULT + part for part in result.split(_QUEUED_IN_RESULT)[1:]]


def feedback(text: str) -> Literal["positive", "negative"] | None:
    """Return how the user's message judges what was done before it, or None if it does not say so plainly."""
    text = text.lstrip()
    if reminders := _OWN_REMINDERS.match(text):
        text = text[reminders.end() :]  # reminders that were sent in front of the user's text
    message = text[: _MAX_MESSAGE_CHARS + 1]
    if _UNDO_COMMANDS.match(message):
        return "negative"
    if queued := _QUEUED.match(message):
        message = _AFTER_QUEUED.split(message[queued.end() :])[0]
    message = message.partition(_REMINDER)[0]
    if len(message) > _MAX_MESSAGE_CHARS or message.startswith(_WRITTEN_BY_PROGRAMS):
        return None
    opening = message[:_OPENING].lower().replace("’", "'").strip()
    begin = _FILLER.match(opening)
    start = begin.end() if begin else 0
    if _APPROVES.match(opening, start):
        return None
    if _NEGATIVE.match(opening, start):
        return "negative"
    praise = _POSITIVE.match(opening, start)
    if praise is None:
        return None
    # Praise followed by a contrast does not count: "great, but it still fails".
    remainder = opening[praise.end() :]
    if contrast := _CONTRAST.search(remainder):
        contrasted = remainder[contrast.end() :].lstrip(" ,:")
        return "negative" if _NEGATIVE.match(contrasted) else None
    return "positive"
