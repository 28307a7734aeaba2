// kt.1 as roff, made from the command tree: what --help says, for man.
#pragma once
#include <string>

#include "cli/help/command_tree.h"

namespace kt::inline cli {

// `version` goes into the footer. No date: the same sources give the same bytes.
std::string man_page(const CommandInfo& kt, const std::string& version);

}  // namespace kt::inline cli
