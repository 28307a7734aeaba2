// What `kt` alone shows on a terminal: the machine, the models that are known here, and three commands that work as
// they stand.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace kt::inline cli {

struct FirstPage {
  struct Fact {
    std::string topic, value;  // "CPU", "AMD EPYC 7763, 2 cores, avx2 kernels"
  };
  struct Model {
    std::string name, description;
  };
  struct Step {
    std::string command, why;
  };
  std::string version;
  std::vector<Fact> machine;
  std::vector<Model> models;  // those that are there, the built-in one first
  size_t more_models = 0;     // that are not in the list
  std::vector<Step> steps;
};

// Of this machine and the registry. Never throws for an odd one: what cannot be read is left out.
FirstPage first_page();

// The commands to begin with: with a model that fits into `memory` bytes where there is one, else with looking for
// some.
struct KnownModel {
  std::string name;
  uint64_t bytes = 0;
};
std::vector<FirstPage::Step> first_steps(const std::vector<KnownModel>& models, uint64_t memory);

// In lines of at most `width` columns, but for commands, which stay whole.
std::string shown_page(const FirstPage& page, int width);

void print_first_page();

}  // namespace kt::inline cli
