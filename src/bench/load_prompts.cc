#include "bench/load_prompts.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace kt::inline bench {
namespace {

// Common words, one token each in most vocabularies.
constexpr auto kWords = std::to_array<std::string_view>(
    {"time",    "year",        "people",   "way",       "day",     "man",      "thing",   "woman",
     "life",    "child",       "world",    "school",    "state",   "family",   "student", "group",
     "country", "problem",     "hand",     "part",      "place",   "case",     "week",    "company",
     "system",  "program",     "question", "work",      "number",  "night",    "point",   "home",
     "water",   "room",        "mother",   "area",      "money",   "story",    "fact",    "month",
     "lot",     "right",       "study",    "book",      "eye",     "job",      "word",    "business",
     "issue",   "side",        "kind",     "head",      "house",   "service",  "friend",  "father",
     "power",   "hour",        "game",     "line",      "end",     "member",   "law",     "car",
     "city",    "community",   "name",     "president", "team",    "minute",   "idea",    "kid",
     "body",    "information", "back",     "parent",    "face",    "level",    "office",  "door",
     "health",  "person",      "art",      "war",       "history", "party",    "result",  "change",
     "morning", "reason",      "research", "girl",      "guy",     "moment",   "air",     "teacher",
     "force",   "education",   "foot",     "boy",       "age",     "policy",   "process", "music",
     "market",  "sense",       "nation",   "plan",      "college", "interest", "death",   "course",
     "someone", "experience",  "behind",   "reach",     "local",   "cover",    "class",   "field",
     "road",    "star",        "river",    "tree",      "bird",    "stone",    "garden",  "winter",
     "summer"});

// splitmix64: a few words of state, the same everywhere.
uint64_t step(uint64_t& state) {
  state += 0x9e3779b97f4a7c15u;
  uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

void append_words(std::string& out, int words, uint64_t& state) {
  for (int i = 0; i < words; ++i) {
    if (!out.empty()) out += ' ';
    out += kWords[step(state) % kWords.size()];
  }
}

}  // namespace

std::string LoadPrompts::next(int words, std::string_view prefix) {
  std::string out(prefix);
  // First words go round the list, so neighbours in time never begin alike; the second word tells the rounds
  // apart.
  uint64_t number = made_++;
  int left = words;
  do {
    if (!out.empty()) out += ' ';
    out += kWords[number % kWords.size()];
    number /= kWords.size();
  } while (--left > 0 && number > 0);
  append_words(out, left, state_);
  return out;
}

std::string LoadPrompts::shared(int words) const {
  uint64_t state = ~seed_;
  std::string out;
  append_words(out, words, state);
  return out;
}

int LoadPrompts::words_for(int64_t tokens, const CountTokens& count) {
  // Over many words, because words differ; one word alone shows what comes on top of them.
  constexpr int kSample = 2048;
  const auto one = static_cast<double>(count(LoadPrompts(0).next(1)));
  const auto many = static_cast<double>(count(LoadPrompts(0).next(kSample)));
  if (many <= one) return static_cast<int>(std::max<int64_t>(tokens, 1));
  const double per_word = (many - one) / (kSample - 1);
  return std::max(1, static_cast<int>(std::lround(1 + (static_cast<double>(tokens) - one) / per_word)));
}

}  // namespace kt::inline bench
