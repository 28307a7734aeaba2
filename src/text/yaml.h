// YAML from files nobody vouches for, as the value read_json() gives: the config file, placement rules and
// training recipes. Bounded in size and depth; what means different things to different readers is refused,
// never guessed.
//
// Read: one document; block and flow mappings and sequences; plain, quoted, literal and folded scalars;
// comments. A plain scalar is null, a boolean or a number by the core schema of YAML 1.2, with two additions
// for the sake of recipes that PyYAML reads too: yes, no, on and off are booleans, and as in YAML 1.2 (not in
// PyYAML) 1e-4 is a number as well as 1.0e-4. Dates are text. A key is text, as written: `10: a` has the key
// "10". As in PyYAML and unlike the letter of the standard, the lines of a flow collection or a quoted scalar
// need no indentation.
//
// Refused, each by name: anchors, aliases, merge keys, tags, directives, keys that are not one scalar on one
// line, duplicate keys, tabs in indentation, a second document, .inf and .nan, integers beyond 64 bits, and
// plain scalars that YAML 1.1 and 1.2 read as different values (010, 1_000, 1:30, 0b1).
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "text/json.h"

namespace kt::inline texts {

struct YamlLimits {
  size_t bytes = 16u << 20;
  int depth = 64;
  size_t values = 1u << 20;  // scalars, mappings and sequences
};

// Where the values of a document stand, in its shape: a collection has its parts in the order of the file.
struct YamlLines {
  int line = 0;          // from 1: of the dash of an entry of a sequence, of the key of one of a mapping
  std::string key = {};  // of an entry of a mapping
  std::vector<YamlLines> parts = {};

  // That of the entry with this key, or of this value where it has none such.
  const YamlLines& of(std::string_view name) const;
};

// The value, or Error(kInput) "<name>:<line>:<column>: found ..., expected ..." in one line; both count
// characters from 1. An empty text is null. Mappings become Json objects, which sort their keys.
// `lines`, unless null, gets what was read of them, before an Error too.
Json parse_yaml(std::string_view characters, std::string_view name, YamlLimits limits = {},
                YamlLines* lines = nullptr);
// The same of a whole file; a file that is missing or larger than the limit is an Error naming it.
Json read_yaml(const std::string& path, YamlLimits limits = {}, YamlLines* lines = nullptr);

// Block style, ending in a line break, for people to edit: parse_yaml() of it equals the value, and PyYAML
// reads the same. Error(kInput) for what YAML here cannot hold: a number that is not finite, a string that is
// not UTF-8, binary.
std::string to_yaml(const Json& value);

}  // namespace kt::inline texts
