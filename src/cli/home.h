// The folder of kt's own files, and how they are read and changed. What is in them is said in settings.h and
// registry.h.
#pragma once
#include <functional>
#include <string>
#include <string_view>

#include "text/json.h"
#include "text/shown.h"

namespace kt::inline cli {

// $KT_HOME, else $XDG_CONFIG_HOME/kt, else ~/.config/kt. Nothing is created. Error without any of the three.
std::string kt_home();

// The YAML mapping in `path`; an empty one if there is no such file or nothing in it. Error naming the file
// if it holds anything but a mapping.
Json read_mapping(const std::string& path);

// Reads the mapping in `path` of kt_home(), lets `change` edit it, and replaces the file; `heading` are the
// lines of comment at its top. One process at a time from reading to replacing, so that none loses what
// another wrote. The file is the owner's alone to read: there are keys in it. When `change` throws, nothing
// is written.
void update_mapping(const std::string& path, std::string_view heading,
                    const std::function<void(Json&)>& change);

}  // namespace kt::inline cli
