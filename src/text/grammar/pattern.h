// Regular expressions as automata over characters: the subset of ECMA-262 that needs no memory. They only
// say whether a whole text matches, so greedy and lazy are the same.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "text/unicode.h"

namespace kt::inline texts {

struct Pattern {
  static constexpr int kNoSet = -1;
  struct Edge {
    int from = 0, to = 0;
    int set = kNoSet;  // of `sets`; kNoSet: eats nothing
  };
  int states = 0, start = 0, end = 0;
  std::vector<Edge> edges;
  std::vector<CodeSet> sets;  // all different

  int state();  // Error(kInput) when there are too many
  int set(const CodeSet& set);
  void edge(int from, int to, int set = kNoSet);
};

const CodeSet& all_characters();

// What contains a match, as JSON Schema has it: ^ and $ tie it to the ends. Understood: literals, '.',
// [classes], \d \w \s \D \W \S \p{..} \P{..} and the escapes of characters, groups, |, ? * + {m} {m,} {m,n},
// and ^ and $ at the ends of the outermost alternatives. Error(kInput) "pattern ...: ... at byte N".
Pattern compiled_pattern(std::string_view expression);
// Texts of so many characters; most -1: any number.
Pattern length_pattern(int64_t least, int64_t most);
// What matches both.
Pattern intersection(const Pattern& a, const Pattern& b);
bool matches(const Pattern& pattern, std::string_view text);

}  // namespace kt::inline texts
