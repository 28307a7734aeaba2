// The Python that a shell here would start, what packages it has, and whether they can be imported.
#pragma once
#include <chrono>
#include <map>
#include <set>
#include <string>

namespace kt::inline cli {

// What importing a module came to.
struct PythonModule {
  std::string problem;                       // one line; "" if it was imported
  std::map<std::string, std::string> facts;  // of kt_kernel: version, isa; of torch: version, cuda, gpus
};

struct PythonFacts {
  std::string program;                          // its path; "" if there is none
  std::string version;                          // "3.11.2"
  std::map<std::string, std::string> packages;  // versions, of those that are installed
  std::set<std::string> importable;             // of kt_kernel alone, which need not be a package
  // With kImports: kt_kernel, torch and sglang, as far as they are there; sglang is the part of SGLang that takes
  // experts from kt_kernel.
  std::map<std::string, PythonModule> modules;
  std::string problem;  // why nothing is known; "" if something is
};

enum class PythonDepth {
  kVersions,  // packages are looked up in their metadata; nothing is imported
  kImports,   // modules are imported too, which takes seconds with torch
};

struct PythonQuestion {
  std::string path;          // folders as in PATH
  std::string program = {};  // another than python3 of those folders: a path, or a name in one of them
  PythonDepth depth = PythonDepth::kVersions;
  std::chrono::milliseconds patience{10000};
};

// Asks `program`, else `python3`, else `python`, of those folders; the folder this is called in is no place that Python
// looks into. Takes no longer than the patience, however long Python takes; what was answered by then is kept.
PythonFacts python_on_path(const PythonQuestion& question);

// The folders a shell here looks into.
std::string folders_of_path();

}  // namespace kt::inline cli
