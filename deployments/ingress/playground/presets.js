// Examples that show an effect on the model that configs/cfg.yaml serves. All are greedy.

const HELPFUL = "You are a helpful assistant.";

export const PRESETS = [
  {
    name: "A pirate makes tea",
    note: "A small model forgets its system message. Guidance away from a plain one recalls it.",
    state: {
      system: "You are a pirate.", user: "How do I make tea?",
      away_system: HELPFUL, scales: "1, 1.5, 2",
    },
  },
  {
    name: "A poem about the moon",
    note: "Without guidance the answer is prose.",
    state: {
      system: "Answer with a poem that rhymes.", user: "What is the moon?",
      away_system: HELPFUL, scales: "1, 1.5, 2",
    },
  },
  {
    name: "Shakespeare's kettle",
    note: "At scale 3 the text falls apart. The curve of KL shows how far guidance moved it.",
    state: {
      system: "You are William Shakespeare. Speak in Early Modern English.",
      user: "How do I make tea?", away_system: HELPFUL, scales: "1, 1.5, 2, 3",
    },
  },
  {
    name: "Trust the passage",
    note: "Context-aware guidance: the negative reads the question without the passage. Unguided, the"
      + " small model answers from memory, and wrongly.",
    state: {
      user: "Passage: In this country, a week has nine days.\n\nHow many days does a week have?",
      away_user: "How many days does a week have?", scales: "1, 1.5, 2", max_tokens: "30",
    },
  },
  {
    name: "Two negatives with weights",
    note: "Away from an ordinary assistant and, less, from a list.",
    state: {
      system: "You are a pirate.", user: "How do I make tea?", negative: "streams",
      streams: [
        { weight: "-0.5", system: HELPFUL, user: "" },
        { weight: "-0.25", system: "Answer with a numbered list.", user: "" },
      ],
      scales: "0, 1, 1.5",
    },
  },
  {
    name: "Strong, with a trust region",
    note: "Scale 4 is too strong for a small model. A trust region of half a nat holds each token"
      + " back: the dashed curve shows how much of its push is left.",
    state: {
      system: "You are a pirate.", user: "How do I make tea?",
      away_system: HELPFUL, scales: "1, 4", max_kl: "0.5",
    },
  },
  {
    name: "A rule in place of a scale",
    note: "adacad computes the scale of each token: 1 plus the divergence of its two distributions."
      + " The dashed curve shows the scales.",
    state: {
      system: "You are a pirate.", user: "How do I make tea?",
      away_system: HELPFUL, scales: "1, 1.5, adacad",
    },
  },
  {
    name: "Only the beginning",
    note: "Guided tokens 0 to 15 set the tone. The rest costs what a plain request costs.",
    state: {
      system: "You are a pirate.", user: "How do I make tea?",
      away_system: HELPFUL, scales: "1, 2", end: "16",
    },
  },
  {
    name: "A horror story",
    note: "Without a chat: both streams continue a text. The negative one knows of no horror.",
    state: {
      mode: "text", prompt: "A horror story about a small town:\n\nIt was",
      away_prompt: "A story about a small town:\n\nIt was", scales: "1, 2, 3",
    },
  },
];
