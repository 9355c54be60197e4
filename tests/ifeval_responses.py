"""Responses to IFEval prompts, made without a model: fixed texts, ones that follow the instructions, and mutations."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

PROSE = (
    "The morning train was late again, and everybody on the platform looked at the clock. Mr. Smith was not surprised! "
    "Was it the weather? He had seen it all before, e.g. in the winter of 1987. Nobody said a word until the U.S. mail "
    "arrived at 9 a.m. and the doors opened."
)
OTHER_LANGUAGES = {
    "ar": "وصل القطار متأخرا هذا الصباح، وكان الجميع ينظرون إلى الساعة على الرصيف.",
    "bg": "Влакът отново закъсня тази сутрин и всички на перона гледаха часовника.",
    "bn": "আজ সকালে ট্রেন আবার দেরি করেছে এবং প্ল্যাটফর্মে সবাই ঘড়ির দিকে তাকিয়ে ছিল।",
    "de": "Der Zug hatte heute Morgen wieder Verspätung, und alle schauten auf die Uhr am Bahnsteig.",
    "fa": "قطار امروز صبح دوباره دیر کرد و همه روی سکو به ساعت نگاه می‌کردند.",
    "fi": "Juna oli tänä aamuna taas myöhässä ja kaikki laiturilla katsoivat kelloa.",
    "gu": "આજે સવારે ટ્રેન ફરી મોડી પડી અને પ્લેટફોર્મ પર બધા ઘડિયાળ તરફ જોઈ રહ્યા હતા.",
    "hi": "आज सुबह ट्रेन फिर देर से आई और प्लेटफार्म पर सब लोग घड़ी देख रहे थे।",
    "it": "Il treno era di nuovo in ritardo questa mattina e tutti sul binario guardavano l'orologio.",
    "kn": "ಇಂದು ಬೆಳಿಗ್ಗೆ ರೈಲು ಮತ್ತೆ ತಡವಾಗಿ ಬಂದಿತು ಮತ್ತು ಎಲ್ಲರೂ ಗಡಿಯಾರವನ್ನು ನೋಡುತ್ತಿದ್ದರು.",
    "ko": "오늘 아침 기차가 또 늦었고 승강장의 모든 사람들이 시계를 바라보았다.",
    "mr": "आज सकाळी गाडी पुन्हा उशिरा आली आणि फलाटावर सगळे लोक घड्याळाकडे पाहत होते.",
    "ne": "आज बिहान रेल फेरि ढिला आयो र प्लेटफर्ममा सबैले घडी हेरिरहेका थिए।",
    "pa": "ਅੱਜ ਸਵੇਰੇ ਰੇਲ ਗੱਡੀ ਫਿਰ ਦੇਰ ਨਾਲ ਆਈ ਅਤੇ ਸਾਰੇ ਲੋਕ ਘੜੀ ਵੱਲ ਦੇਖ ਰਹੇ ਸਨ।",
    "pt": "O comboio estava outra vez atrasado esta manhã e todos na plataforma olhavam para o relógio.",
    "ru": "Поезд сегодня утром снова опоздал, и все на платформе смотрели на часы.",
    "sw": "Treni ilichelewa tena asubuhi hii na kila mtu kwenye jukwaa alikuwa akiangalia saa.",
    "ta": "இன்று காலை ரயில் மீண்டும் தாமதமாக வந்தது, அனைவரும் கடிகாரத்தைப் பார்த்தார்கள்.",
    "te": "ఈ ఉదయం రైలు మళ్ళీ ఆలస్యంగా వచ్చింది మరియు అందరూ గడియారం వైపు చూశారు.",
    "th": "เช้านี้รถไฟมาสายอีกแล้ว และทุกคนบนชานชาลาต่างมองนาฬิกา",
    "ur": "آج صبح ٹرین پھر دیر سے آئی اور پلیٹ فارم پر سب لوگ گھڑی دیکھ رہے تھے۔",
    "vi": "Sáng nay tàu lại đến muộn và mọi người trên sân ga đều nhìn đồng hồ.",
}
FIXED = (
    "",
    "  \n",
    "a",
    "123 456",
    PROSE,
    PROSE.lower(),
    PROSE.upper(),
    PROSE.lower().replace(",", ""),
    PROSE.title(),
    f'"{PROSE}"',
    f"\u201c{PROSE}\u201d",
    " ".join([PROSE] * 8),
    f"{PROSE}\n\n{PROSE.lower()}\n\nSecond, two.",
    f"{PROSE}\n\n\n\n{PROSE}",
    f"\n\n{PROSE}\n",
    "A\n***\nB\n***\nC",
    "***\nA ***bold*** text\n******\nB",
    "A\n******\nB",
    "A\n******\nA\n******\n",
    "* a\n* b\n\n- c\n  - d\n---\n**Head**\n*emphasis* here\n*\n* e",
    "* **One**: x\n* **Two**: *y*\n\n*z* ** * **",
    "- [ ] a\n- [x] b\n[name] and [address], [1], [[x]], [a link](b), [",
    "Section 1\nA\nSECTION 2\nB\nDay 3 Day 3\nPARAGRAPH 1 Audience 2",
    "<<poem of joy>>\n<< >> <<>> <<<a>>>",
    "1 << 2 and 4 >> 1",
    '```json\n{"a": [1, 2, null]}\n```',
    '{"a": NaN}',
    '"text"',
    'Here: {"a": 1}',
    'Bye. "Any other questions?"',
    "My answer is yes.",
    "my answer is no. My answer is maybe. My answer is no.",
    f"{PROSE}\nP.S. Call me.\np.p.s. Or P. P. S write.",
    "stop.s. and up. s. and P.P.S",
    "naïve café — “quoted” … 🙂🙂 ﬁne İstanbul ΟΔΟΣ\u2028line\r\nend",
    *OTHER_LANGUAGES.values(),
)
"""Whatever the prompt."""

_TOKENS = (
    *(
        "***",
        "******",
        "\n\n",
        "\n",
        "*",
        "**",
        "* ",
        "- ",
        "[x]",
        "[",
        "]",
        ",",
        '"',
        "'",
        "<<",
        ">>",
        "P.S. ",
        "P.P.S",
    ),
    *(
        "Section 1 ",
        "SECTION 2 ",
        "Dr. ",
        "U.S. ",
        "... ",
        "? ",
        "! ",
        "I ",
        "NASA ",
        "{",
        "}",
        "```",
        "\t",
        "\r\n",
        "é",
        "🙂",
    ),
)


def following(instruction_ids: Sequence[str], kwargs: Sequence[Mapping[str, Any]], words: int = 60) -> str:
    """A response that follows the instructions as far as they agree with each other."""
    body = " ".join((PROSE.split() * (words // 40 + 1))[:words]) + "."
    for name, given in zip(instruction_ids, kwargs, strict=True):
        body = _PARTS.get(name, lambda body, given: body)(body, given)
    names = set(instruction_ids)
    for name, given in zip(instruction_ids, kwargs, strict=True):
        body = _WHOLE.get(name, lambda body, given: body)(body, given)
    return f'"{body}"' if "startend:quotation" in names else body


def mutated(text: str, rng: random.Random, keywords: Sequence[str] = ()) -> str:
    """The text after a few random cuts, insertions, repetitions and changes of letter case."""
    for _ in range(rng.randint(1, 6)):
        start = rng.randint(0, len(text))
        end = min(len(text), start + rng.randint(0, 30))
        match rng.randrange(6):
            case 0:
                text = text[:start] + text[end:]
            case 1 | 2:
                text = text[:start] + rng.choice((*_TOKENS, *keywords)) + text[start:]
            case 3:
                text = text[:end] + text[start:]
            case 4:
                text = text[:start] + text[start:end].swapcase() + text[end:]
            case _:
                lines = text.split("\n")
                rng.shuffle(lines)
                text = "\n".join(lines)
    return text


def responses(
    instruction_ids: Sequence[str], kwargs: Sequence[Mapping[str, Any]], rng: random.Random, count: int
) -> list[str]:
    """`count` responses to one prompt: a third built to follow it, a third fixed texts, a third mutations of both."""
    built = [following(instruction_ids, kwargs, words) for words in (5, 60, 400, 1200)]
    texts = [value for given in kwargs for value in given.values() if isinstance(value, str)]
    keywords = [word for given in kwargs for value in given.values() if isinstance(value, list) for word in value]
    chosen = [rng.choice(built) for _ in range(count // 3)] + [rng.choice(FIXED) for _ in range(count // 3)]
    while len(chosen) < count:
        chosen.append(mutated(rng.choice((*built, *FIXED)), rng, (*keywords, *texts)))
    return chosen


def _number(given: Mapping[str, Any], name: str, relation: str) -> int:
    """A count that stands in the relation to the threshold."""
    return int(given[name]) if given[relation] == "at least" else max(0, int(given[name]) - 1)


def _sections(body: str, given: Mapping[str, Any]) -> str:
    splitter, count = given["section_spliter"], given["num_sections"]
    return "\n".join(f"{splitter} {number}\n{body}" for number in range(1, count + 1))


def _nth_paragraph(body: str, given: Mapping[str, Any]) -> str:
    paragraphs = [body] * given["num_paragraphs"]
    paragraphs[given["nth_paragraph"] - 1] = f"{given['first_word'].title()}, {body}"
    return "\n\n".join(paragraphs)


_PARTS = {
    "change_case:capital_word_frequency": lambda body, given: (
        body.lower() + " NASA" * _number(given, "capital_frequency", "capital_relation")
    ),
    "keywords:existence": lambda body, given: f"{body} {' '.join(given['keywords'])}",
    "keywords:frequency": lambda body, given: body + f" {given['keyword']}" * _number(given, "frequency", "relation"),
    "keywords:letter_frequency": lambda body, given: (
        body + given["letter"] * _number(given, "let_frequency", "let_relation")
        if given["let_relation"] == "at least"
        else "hmm"
    ),
    "language:response_language": lambda body, given: OTHER_LANGUAGES.get(given["language"], body),
    "length_constraints:number_sentences": lambda body, given: (
        " ".join(["He waited."] * _number(given, "num_sentences", "relation")) or body
    ),
    "length_constraints:number_words": lambda body, given: (
        f"{body} {'word ' * given['num_words']}"
        if given["relation"] == "at least"
        else " ".join(body.split()[: given["num_words"] // 2])
    ),
    "detectable_content:number_placeholders": lambda body, given: body + " [name]" * given["num_placeholders"],
    "detectable_format:number_bullet_lists": lambda body, given: body + "\n* point" * given["num_bullets"],
    "detectable_format:number_highlighted_sections": lambda body, given: body + " *part*" * given["num_highlights"],
    "detectable_format:constrained_response": lambda body, given: "My answer is maybe.",
    "detectable_format:title": lambda body, given: f"<<The title>>\n{body}",
}
_WHOLE = {
    "detectable_format:multiple_sections": _sections,
    "length_constraints:number_paragraphs": lambda body, given: "\n***\n".join([body] * given["num_paragraphs"]),
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "combination:two_responses": lambda body, given: f"{body}\n******\nAnother. {body}",
    "combination:repeat_prompt": lambda body, given: f"{given['prompt_to_repeat']}\n{body}",
    "detectable_content:postscript": lambda body, given: f"{body}\n{given['postscript_marker']} Call me.",
    "startend:end_checker": lambda body, given: f"{body} {given['end_phrase']}",
    "detectable_format:json_format": lambda body, given: f"```json\n{json.dumps({'text': body})}\n```",
    "change_case:english_capital": lambda body, given: body.upper(),
    "change_case:english_lowercase": lambda body, given: body.lower(),
    "punctuation:no_comma": lambda body, given: body.replace(",", ""),
}
