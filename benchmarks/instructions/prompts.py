"""Table 1: 14 families of 10 instructions, each with a question and a checker.

The conditional conversation has the instruction as its system message. The negative conversation
has `NEGATIVE` there, and the same question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from instructions import checkers
from instructions.checkers import Checker

NEGATIVE = "You are a helpful assistant."
MAX_TOKENS = 80


@dataclass(frozen=True)
class Prompt:
    name: str
    """The family and a number, such as "word/3"."""
    family: str
    instruction: str
    question: str
    checker: Checker

    def conditional(self) -> list[dict[str, str]]:
        return conversation(self.instruction, self.question)

    def negative(self) -> list[dict[str, str]]:
        return conversation(NEGATIVE, self.question)


def conversation(system: str, user: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


SAME_FOR_ALL: dict[str, tuple[str, Callable[[], Checker], tuple[str, ...]]] = {
    "one_sentence": (
        "Answer in one short sentence only.",
        checkers.one_sentence,
        (
            "Why is the sky blue?",
            "What does a blacksmith do?",
            "How do bees make honey?",
            "Why do leaves fall in autumn?",
            "What is a volcano?",
            "How does a sailing boat move?",
            "Why do people keep diaries?",
            "What is the use of a compass?",
            "Tell me about the moon.",
            "How is bread made?",
        ),
    ),
    "lower_case": (
        "Write in lower case letters only. Never use a capital letter.",
        checkers.lower_case,
        (
            "Describe a walk in the woods.",
            "What can I cook with potatoes?",
            "Who was Albert Einstein?",
            "Name three cities in Italy.",
            "How do I clean a window?",
            "What happens in January?",
            "Tell me about the Atlantic Ocean.",
            "Give me advice for a job interview.",
            "What is the Eiffel Tower?",
            "Why do cats purr?",
        ),
    ),
    "upper_case": (
        "WRITE IN CAPITAL LETTERS ONLY. Every letter of your answer must be a capital.",
        checkers.upper_case,
        (
            "Announce the opening of a bakery.",
            "Warn people about thin ice.",
            "What is a thunderstorm?",
            "How do I wash a wool jumper?",
            "Describe a football match.",
            "What do elephants eat?",
            "Say something about the desert.",
            "Why should we save water?",
            "What is a library for?",
            "Tell me about trains.",
        ),
    ),
    "no_commas": (
        "Do not use any commas in your answer.",
        checkers.without_commas,
        (
            "What should I pack for a trip to the mountains?",
            "Which colors does a rainbow have?",
            "What do I need to bake a cake?",
            "Describe your favorite season.",
            "What is in a first aid kit?",
            "How do I plant a tree?",
            "Which animals live on a farm?",
            "What makes a good friend?",
            "Tell me about the four seasons.",
            "What can children do on a rainy day?",
        ),
    ),
    "json": (
        "Answer with one short JSON object and nothing else. Do not explain it.",
        checkers.json_object,
        (
            "Give the name and the age of an imaginary person.",
            "What is the capital of Norway?",
            "Describe an apple by its color and its shape.",
            "Name a bird and say whether it can fly.",
            "What is two plus three?",
            "Give the title and the author of a book.",
            "Which day comes after Monday?",
            "Describe a car by its brand and its color.",
            "Name a fruit and its price.",
            "Say the name and the size of a planet.",
        ),
    ),
    "question": (
        "Never answer. Reply with one short question only, to learn more about what is asked.",
        checkers.asks_back,
        (
            "I want to buy a bicycle.",
            "How do I fix my computer?",
            "Which book should I read?",
            "I have a headache.",
            "Plan a holiday for me.",
            "What should I cook tonight?",
            "My plant is dying.",
            "Help me to choose a present.",
            "I want to learn an instrument.",
            "Where should I live?",
        ),
    ),
    "title": (
        "Begin your answer with a title in double angle brackets, like this: <<title>>.",
        checkers.title,
        (
            "Write about a lighthouse.",
            "Write a short poem on snow.",
            "Tell a story about a lost key.",
            "Explain how a kite flies.",
            "Describe a busy market.",
            "Write about a dog that can swim.",
            "Tell me how glass is made.",
            "Write a few lines about friendship.",
            "Describe a night in the city.",
            "Explain what a bridge is for.",
        ),
    ),
}
"""Family: its instruction, its checker and its questions."""

ONE_EACH: dict[str, tuple[tuple[str, Callable[[str], Checker], str, str], ...]] = {
    "word": tuple(
        (f'Use the word "{word}" in your answer.', checkers.contains_word, word, question)
        for word, question in (
            ("lantern", "How do I get to sleep early?"),
            ("marble", "What is a good breakfast?"),
            ("whistle", "How do I stay fit?"),
            ("velvet", "Describe a summer evening."),
            ("hammer", "What makes a team strong?"),
            ("orchard", "How can I save money?"),
            ("puzzle", "Why do we study history?"),
            ("feather", "What is a cloud?"),
            ("bridge", "How do I make new friends?"),
            ("mirror", "What does a teacher do?"),
        )
    ),
    "language": tuple(
        (f"Answer in {language} only.", checkers.in_language, language, question)
        for language, question in (
            ("German", "What is a dog?"),
            ("German", "How is the weather in winter?"),
            ("German", "Tell me about your family."),
            ("German", "What do you eat for breakfast?"),
            ("French", "What is a school?"),
            ("French", "Tell me about Paris."),
            ("French", "What do you do on Sunday?"),
            ("Spanish", "What is a garden?"),
            ("Spanish", "Tell me about the sea."),
            ("Spanish", "What is your favorite food?"),
        )
    ),
    "short": tuple(
        (f"Answer in at most {most} words.", checkers.at_most_words, most, question)
        for most, question in (
            ("3", "What is the color of snow?"),
            ("5", "What is a dentist?"),
            ("5", "Where do penguins live?"),
            ("6", "Why do we sleep?"),
            ("8", "What is music?"),
            ("8", "How does a candle work?"),
            ("10", "Why are forests important?"),
            ("10", "What is a computer?"),
            ("12", "How do I boil an egg?"),
            ("15", "Explain what rain is."),
        )
    ),
    "list": (
        *(
            (
                f"Answer with exactly {count} bullet points, one on each line. Begin each line with"
                ' "- " and use at most four words in it.',
                checkers.bullets,
                count,
                question,
            )
            for count, question in (
                ("2", "What do plants need?"),
                ("3", "What can I do at the beach?"),
                ("3", "Which tools does a gardener use?"),
                ("4", "Name vegetables."),
                ("5", "What is in a kitchen?"),
            )
        ),
        *(
            (
                f"Answer with a numbered list of exactly {count} items, one on each line, and use"
                " at most four words for each item.",
                checkers.numbered,
                count,
                question,
            )
            for count, question in (
                ("2", "Name sports that need a ball."),
                ("3", "How do I brush my teeth?"),
                ("3", "Which pets are easy to keep?"),
                ("4", "Name musical instruments."),
                ("5", "What can I see in space?"),
            )
        ),
    ),
    "begins": tuple(
        (
            f'Begin your answer with the words "{phrase}".',
            checkers.begins_with,
            phrase,
            question,
        )
        for phrase, question in (
            ("Good question", "What is gravity?"),
            ("In my opinion", "Are cats better than dogs?"),
            ("Long ago", "Where does paper come from?"),
            ("Dear friend", "How do I learn to dance?"),
            ("To be honest", "Is it hard to run a marathon?"),
            ("Listen carefully", "How do I cross a road?"),
            ("As everybody knows", "Why is exercise healthy?"),
            ("Imagine a river", "What is electricity?"),
            ("First of all", "How do I write a letter?"),
            ("My grandmother says", "How do I cure a cold?"),
        )
    ),
    "ends": tuple(
        (
            f'Answer in one or two short sentences. End your answer with the words "{phrase}".',
            checkers.ends_with,
            phrase,
            question,
        )
        for phrase, question in (
            ("and that is all", "What is a mountain?"),
            ("have a nice day", "How do I open a jar?"),
            ("I hope this helps", "What is a passport?"),
            ("so be careful", "How do I light a fire?"),
            ("over and out", "What is a radio?"),
            ("ask me again tomorrow", "Will it rain this week?"),
            ("the end", "Tell me a story about a frog."),
            ("good luck", "How do I pass an exam?"),
            ("thank you for asking", "How are you today?"),
            ("as simple as that", "How do I make tea?"),
        )
    ),
    "persona": tuple(
        (instruction, checkers.speaks_like, persona, question)
        for persona, instruction, question in (
            ("pirate", "You are a pirate. Talk like one.", "How do I make coffee?"),
            ("pirate", "You are a pirate. Talk like one.", "What is the internet?"),
            ("pirate", "Answer like a rough old pirate.", "Where can I buy shoes?"),
            ("pirate", "Answer like a rough old pirate.", "Why is the grass green?"),
            ("Shakespeare", "Speak like a character of Shakespeare.", "What is love?"),
            ("Shakespeare", "Speak like a character of Shakespeare.", "Is it time for lunch?"),
            ("Shakespeare", "Answer in old English, as Shakespeare did.", "How do I fix a door?"),
            ("cowboy", "You are a cowboy. Talk like one.", "How do I keep warm at night?"),
            ("cowboy", "You are a cowboy. Talk like one.", "What should I eat for dinner?"),
            ("cowboy", "Answer with a cowboy's accent.", "How far away is the sun?"),
        )
    ),
}
"""Family: for each of its prompts the instruction, the checker, its argument, and the question."""


def prompts(most: int | None = None) -> list[Prompt]:
    """All prompts, or the first `most`. The families take turns, so that a part is varied."""
    by_family = [
        *([*_same(family)] for family in SAME_FOR_ALL),
        *([*_each(family)] for family in ONE_EACH),
    ]
    return [prompt for turn in zip(*by_family, strict=True) for prompt in turn][:most]


def _same(family: str) -> Iterator[Prompt]:
    instruction, checker, questions = SAME_FOR_ALL[family]
    for i, question in enumerate(questions):
        yield Prompt(f"{family}/{i}", family, instruction, question, checker())


def _each(family: str) -> Iterator[Prompt]:
    for i, (instruction, checker, argument, question) in enumerate(ONE_EACH[family]):
        yield Prompt(f"{family}/{i}", family, instruction, question, checker(argument))
