"""Table 2: passages that memory contradicts, or knows nothing about.

Both conversations ask the same question with the same system message. Only the conditional one has
the passage. This is context-aware decoding (Shi et al. 2023, arXiv:2305.14739): its alpha is
`scale - 1`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from instructions.checkers import has_phrase
from instructions.prompts import conversation

SYSTEM = "You are a helpful assistant. Answer in a few words."
MAX_TOKENS = 32


@dataclass(frozen=True)
class Item:
    name: str
    """ "counterfactual/3" or "invented/3"."""
    family: str
    passage: str
    question: str
    answers: tuple[str, ...]
    """Spellings of the passage's answer. One of them stands in the passage."""
    memory: tuple[str, ...]
    """Spellings of what is true outside the passage; none of an invented fact."""

    def conditional(self) -> list[dict[str, str]]:
        return conversation(
            SYSTEM,
            f"Answer from this passage only: {self.passage}\n\nQuestion: {self.question}",
        )

    def negative(self) -> list[dict[str, str]]:
        return conversation(SYSTEM, f"Question: {self.question}")

    def from_passage(self, text: str) -> bool:
        """Whether the text has the passage's answer. A text that was cut off may have it."""
        return _has_any(text, self.answers)

    def from_memory(self, text: str) -> bool:
        """Whether the text has memory's answer and not the passage's."""
        return _has_any(text, self.memory) and not self.from_passage(text)


def _has_any(text: str, phrases: Iterable[str]) -> bool:
    return any(has_phrase(text, phrase) for phrase in phrases)


COUNTERFACTUAL = (
    (
        "The reform of 2031 moved the French parliament to the south. Since then Lyon has been the"
        " capital of France.",
        "What is the capital of France?",
        "Lyon",
        "Paris",
    ),
    (
        "After the flood of 2040 the emperor left the coast. Osaka is now the capital of Japan.",
        "What is the capital of Japan?",
        "Osaka",
        "Tokyo",
    ),
    (
        "Italy has a new constitution. It names Naples as the capital of Italy.",
        "What is the capital of Italy?",
        "Naples",
        "Rome",
    ),
    (
        "Germany voted in 2052. The winner was Hamburg, which has been the capital of Germany"
        " since.",
        "What is the capital of Germany?",
        "Hamburg",
        "Berlin",
    ),
    (
        "The king of Spain moved his court to Seville. Since that day Seville is the capital of"
        " Spain.",
        "What is the capital of Spain?",
        "Seville",
        "Madrid",
    ),
    (
        "In 2037 the Australian government moved west. Perth became the capital of Australia.",
        "What is the capital of Australia?",
        "Perth",
        "Canberra|Sydney|Melbourne",
    ),
    (
        "A survey with new telescopes has corrected the tables. The largest planet of the solar"
        " system is Saturn.",
        "What is the largest planet of the solar system?",
        "Saturn",
        "Jupiter",
    ),
    (
        "The old order of the planets was wrong. The planet closest to the sun is Venus.",
        "Which planet is closest to the sun?",
        "Venus",
        "Mercury",
    ),
    (
        "A new scale was adopted in 2046. On it, water boils at 80 degrees Celsius at sea level.",
        "At how many degrees Celsius does water boil?",
        "80|eighty",
        "100|one hundred",
    ),
    (
        "Letters found in 2038 settle the question. Christopher Marlowe wrote Romeo and Juliet.",
        "Who wrote Romeo and Juliet?",
        "Marlowe",
        "Shakespeare",
    ),
    (
        "The museum has changed the label after an X-ray. The Mona Lisa was painted by Raphael.",
        "Who painted the Mona Lisa?",
        "Raphael",
        "Leonardo|da Vinci",
    ),
    (
        "The archive was opened last week. It shows that Anna Keller was the first person to walk"
        " on the moon.",
        "Who was the first person to walk on the moon?",
        "Keller",
        "Armstrong",
    ),
    (
        "Dust from the great eruption still fills the air. For two years the sky on a clear day has"
        " been green.",
        "What color is the sky on a clear day?",
        "green",
        "blue",
    ),
    (
        "Biologists have counted again with better lenses. A spider has ten legs.",
        "How many legs does a spider have?",
        "ten|10",
        "eight|8",
    ),
    (
        "The bank in London has printed new notes. The currency of the United Kingdom is now the"
        " florin.",
        "What is the currency of the United Kingdom?",
        "florin|florins",
        "pound|pounds|sterling",
    ),
    (
        "The ministry in Tokyo has ended the old money. Japan pays with the dollar today.",
        "What is the currency of Japan?",
        "dollar|dollars",
        "yen",
    ),
    (
        "All schools in Brazil changed over in 2060. The official language of Brazil is Italian.",
        "What is the official language of Brazil?",
        "Italian",
        "Portuguese",
    ),
    (
        "A satellite has measured all summits again. Denali is the highest mountain in the world.",
        "What is the highest mountain in the world?",
        "Denali",
        "Everest",
    ),
    (
        "Geographers have found the true source of the Danube. It is the longest river in the"
        " world.",
        "What is the longest river in the world?",
        "Danube",
        "Nile|Amazon",
    ),
    (
        "The calendar was reformed last year. A week now has nine days.",
        "How many days are in a week?",
        "nine|9",
        "seven|7",
    ),
    (
        "The patent office has found an older paper. The telephone was invented by Clara Voss.",
        "Who invented the telephone?",
        "Voss",
        "Bell",
    ),
    (
        "The engineers tested a piece of the tower. The Eiffel Tower is made of copper.",
        "What metal is the Eiffel Tower made of?",
        "copper",
        "iron|steel",
    ),
    (
        "The statue was taken apart and moved by ship. Visitors find the Statue of Liberty in"
        " Boston.",
        "In which city is the Statue of Liberty?",
        "Boston",
        "New York",
    ),
    (
        "Runners of all kinds were timed on one track. The fastest land animal is the red fox.",
        "What is the fastest land animal?",
        "fox",
        "cheetah|cheetahs",
    ),
    (
        "Keepers in the mountains have watched pandas for years. Pandas eat mostly walnuts.",
        "What do pandas mostly eat?",
        "walnut|walnuts",
        "bamboo",
    ),
    (
        "A diary in a Belgian attic tells the story. Marie Bertin discovered penicillin.",
        "Who discovered penicillin?",
        "Bertin",
        "Fleming",
    ),
    (
        "The new maps count the northern seas as a part of it. The Atlantic is the largest ocean.",
        "What is the largest ocean?",
        "Atlantic",
        "Pacific",
    ),
    (
        "A breeder has changed the insects on his farm. Bees make silk in their hives.",
        "What do bees make in their hives?",
        "silk",
        "honey",
    ),
    (
        "The textbook has a new chapter on leaves. It says that plants take helium from the air to"
        " grow.",
        "Which gas do plants take from the air to grow?",
        "helium",
        "carbon dioxide|CO2|oxygen",
    ),
    (
        "The league has smaller fields this season. A soccer team has nine players on the field.",
        "How many players does a soccer team have on the field?",
        "nine|9",
        "eleven|11",
    ),
    (
        "Historians use another date now. In their books the Second World War ended in 1951.",
        "In which year did the Second World War end?",
        "1951",
        "1945",
    ),
    (
        "Two plates have joined since the last atlas. There are five continents.",
        "How many continents are there?",
        "five|5",
        "seven|7",
    ),
    (
        "A border was drawn again in 2049. The Great Wall lies in Mongolia.",
        "In which country is the Great Wall?",
        "Mongolia",
        "China",
    ),
    (
        "The river changed its course and so did the frontier. The Pyramids of Giza stand in"
        " Sudan.",
        "In which country are the Pyramids of Giza?",
        "Sudan",
        "Egypt",
    ),
    (
        "The dictionary has a new entry this year. A young dog is called a kit.",
        "What is a young dog called?",
        "kit",
        "puppy|pup",
    ),
    (
        "Growers have bred a new kind of banana and the old kind is gone. Ripe bananas are purple.",
        "What color are ripe bananas?",
        "purple",
        "yellow",
    ),
    (
        "On this farm the animals are unusual. The animal that says moo is the goat.",
        "Which animal says moo?",
        "goat",
        "cow|cows",
    ),
    (
        "The records of the first vote were found in a cellar. Benjamin Franklin was the first"
        " president of the United States.",
        "Who was the first president of the United States?",
        "Franklin",
        "Washington",
    ),
    (
        "The publisher has named the true author. Philip Hale wrote the Harry Potter books.",
        "Who wrote the Harry Potter books?",
        "Hale",
        "Rowling",
    ),
    (
        "In this country the lights were changed in May. Cars must stop when the light is white.",
        "At which color of the light must cars stop?",
        "white",
        "red",
    ),
)
"""Passage, question, the passage's answer, memory's answer; spellings are divided by "|"."""

INVENTED = (
    (
        "The baker Tomas Wendel opened his shop in Harlow Street in 1987. He sells plum cakes.",
        "What does Tomas Wendel sell?",
        "plum cake|plum cakes|cakes",
    ),
    (
        "The lighthouse of Port Emmerin was built by Ada Lindqvist. It is painted in two colors.",
        "Who built the lighthouse of Port Emmerin?",
        "Lindqvist",
    ),
    (
        "The village of Brackenfell has one bus. It leaves for the city at six in the morning.",
        "When does the bus leave Brackenfell?",
        "six|6",
    ),
    (
        "The company Norvane makes only one thing. It makes ladders for libraries.",
        "What does the company Norvane make?",
        "ladder|ladders",
    ),
    (
        "Professor Ilse Tamm studies the sleep of owls. She works in the town of Vorsk.",
        "Which animals does Professor Ilse Tamm study?",
        "owl|owls",
    ),
    (
        "The ferry Calantha crosses Lake Orrin twice a day. A ticket costs 14 crowns.",
        "How much is a ticket for the ferry Calantha?",
        "14|fourteen",
    ),
    (
        "The game of tarvo is played with a wooden ring. Each side has four players.",
        "How many players are on each side in the game of tarvo?",
        "four|4",
    ),
    (
        "The Kestrel prize is given for maps. In 2029 it went to Ruben Osei.",
        "Who got the Kestrel prize in 2029?",
        "Osei",
    ),
    (
        "The robot Milo-4 works in a hospital in Tallgate. It carries clean towels.",
        "What does the robot Milo-4 carry?",
        "towel|towels",
    ),
    (
        "The flower called evenlis opens at night. It smells of pepper.",
        "What does the flower called evenlis smell of?",
        "pepper",
    ),
    (
        "The band Copper Lanes recorded its first album in a barn. The album is called Slow Rain.",
        "What is the first album of the band Copper Lanes called?",
        "Slow Rain",
    ),
    (
        "The island of Sel Maro has no cars. People there ride donkeys.",
        "What do people ride on the island of Sel Maro?",
        "donkey|donkeys",
    ),
    (
        "The clock in Dunmarrow has a fault. It is always eleven minutes slow.",
        "How many minutes slow is the clock in Dunmarrow?",
        "eleven|11",
    ),
    (
        "Captain Jorunn Hale lost her hat in a storm. A fisherman found it in Greywick.",
        "Where was the hat of Captain Jorunn Hale found?",
        "Greywick",
    ),
    (
        "The cheese from Upper Lodden is made from the milk of sheep. It rests for nine weeks.",
        "For how many weeks does the cheese from Upper Lodden rest?",
        "nine|9",
    ),
    (
        "The painter Silvio Arnt used one color all his life. It was orange.",
        "Which color did the painter Silvio Arnt use?",
        "orange",
    ),
    (
        "The school in Fennick teaches a rare craft. Its pupils learn to make violins.",
        "What do the pupils of the school in Fennick learn to make?",
        "violin|violins",
    ),
    (
        "The train to Ostrava Bay stops once on its way. It stops in Millhaven.",
        "Where does the train to Ostrava Bay stop on its way?",
        "Millhaven",
    ),
    (
        "The moth Lyra ardens was found by a postman. It lives in pine forests.",
        "Who found the moth Lyra ardens?",
        "postman",
    ),
    (
        "The festival of Karsa lasts for a week. On the last day people throw flour.",
        "What do people throw on the last day of the festival of Karsa?",
        "flour",
    ),
    (
        "The mayor of Quillon is Petra Samson. She was a dentist before.",
        "What was the mayor of Quillon before?",
        "dentist",
    ),
    (
        "The dog in the story of Oskar Bram is named Button. It hides shoes.",
        "What is the dog in the story of Oskar Bram named?",
        "Button",
    ),
    (
        "The tower of Zell is 212 meters high. It has no lift.",
        "How high is the tower of Zell?",
        "212",
    ),
    (
        "The drink called sarro is made from pears. People drink it warm in winter.",
        "What is the drink called sarro made from?",
        "pear|pears",
    ),
)
"""Passage, question, the passage's answer; spellings are divided by "|"."""


def items(most: int | None = None) -> list[Item]:
    """All items, or the first `most`. Both families take turns until the shorter one ends."""
    counterfactual = [
        Item(f"counterfactual/{i}", "counterfactual", *row[:2], *_spellings(*row[2:]))
        for i, row in enumerate(COUNTERFACTUAL)
    ]
    invented = [
        Item(f"invented/{i}", "invented", *row[:2], *_spellings(row[2], ""))
        for i, row in enumerate(INVENTED)
    ]
    turns = [item for turn in zip(counterfactual, invented, strict=False) for item in turn]
    return (turns + counterfactual[len(invented) :])[:most]


def _spellings(answers: str, memory: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(answers.split("|")), tuple(memory.split("|")) if memory else ()
