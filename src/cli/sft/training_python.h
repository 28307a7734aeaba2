// The Python that trains: found, asked for its packages, started with a plan, watched until it ends.
#pragma once
#include <functional>
#include <string>

#include "cli/sft/training_plan.h"

namespace kt::inline cli {

// The program: KT_PYTHON, else the one beside this program, as pip puts them, else python3 of PATH. Error(kUnsupported)
// in one line, with the command that installs what is missing, unless it has what the recipe needs.
std::string training_python(const Recipe& recipe);

struct TrainingEnd {
  bool interrupted = false;
  OrderedJson result = OrderedJson::object();  // of the last event
};

// Runs `python -m kt_kernel.sft` on the plan. `on_event` gets each of its events, {"event": "step", "loss": ...}, as it
// comes. Ctrl-C and SIGTERM are passed on once, and it saves; at the second this program ends, and Python with it. An
// error of Python's is thrown with its words; so is a Python that ends without saying why.
TrainingEnd run_training(const std::string& python, const TrainingPlan& plan,
                         const std::function<void(const OrderedJson&)>& on_event);

}  // namespace kt::inline cli
