// With stand-ins for Python that answer what a real one may.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/testing/temp_folder.h"
#include "cli/doctor/doctor.h"
#include "cli/verbs.h"

namespace kt::inline cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class DoctorPython : public ::testing::Test {
 protected:
  ~DoctorPython() override {
    for (const Finding& f : d.findings) {
      EXPECT_EQ(f.cost.empty(), f.level == Level::kOk) << f.found;
      EXPECT_EQ(f.fix.empty(), f.level == Level::kOk) << f.found;
      EXPECT_THAT(f.found, Not(HasSubstr("\n")));
    }
  }

  // A program `python3`, first on PATH, that does so.
  void python_does(const std::string& body) {
    const std::string program = folder.at("python3");
    std::ofstream(program) << "#!/bin/sh\n" << body << "\n";
    std::filesystem::permissions(program, std::filesystem::perms::owner_all);
    machine.environment = {"PATH=relative:" + folder.path()};
  }
  // One that prints these lines.
  void python_says(const std::string& lines) { python_does("cat <<'END'\n" + lines + "\nEND"); }

  const Finding& look(std::string_view topic, PythonTest test = PythonTest::kImport) {
    d = {.findings = {}, .checks = {}, .facts = d.facts};
    look_at_python(d, machine, test);
    for (const Finding& f : d.findings)
      if (f.topic == topic) return f;
    static const Finding none;
    return none;
  }

  testing_files::TempFolder folder;
  Machine machine;
  Diagnosis d;
};

TEST_F(DoctorPython, NoneIsNoFault) {
  machine.environment = {"PATH=" + folder.path()};
  EXPECT_EQ(look("python").level, Level::kOk);
  EXPECT_THAT(look("python").found, HasSubstr("none on PATH"));
  EXPECT_TRUE(d.facts["python"].is_null());
  machine.environment = {};
  EXPECT_THAT(look("python").found, HasSubstr("none on PATH"));
}

TEST_F(DoctorPython, OneThatHangsOrFails) {
  machine.python_patience = std::chrono::milliseconds(200);
  python_does("exec /bin/sleep 600");
  EXPECT_THAT(look("python").found, HasSubstr("no answer within 0 s"));
  machine.python_patience = std::chrono::seconds(60);
  python_does("exit 3");
  EXPECT_THAT(look("python").found, HasSubstr("does not work"));
  EXPECT_EQ(look("python").level, Level::kWarning);
  python_does("kill -ILL $$");
  EXPECT_THAT(look("python").found, HasSubstr("signal 4"));
  python_says("[1, 2]\n{\"version\": 3}\nnonsense");
  EXPECT_THAT(look("python").found, HasSubstr("does not work"));
}

TEST_F(DoctorPython, Bare) {
  python_says(R"({"version": "3.9.1", "packages": {}})");
  EXPECT_EQ(look("python").level, Level::kWarning);  // kt_kernel wants a newer one
  python_says(R"({"version": "3.12.1", "packages": {}})");
  for (const char* topic : {"python", "kt_kernel", "torch", "sglang"})
    EXPECT_EQ(look(topic).level, Level::kOk);
  EXPECT_THAT(look("kt_kernel").found, HasSubstr("not installed"));
  EXPECT_EQ(d.facts["python"]["version"], "3.12.1");
  EXPECT_TRUE(d.facts["python"]["kt_kernel"].is_null());
}

TEST_F(DoctorPython, Whole) {
  python_says(
      R"({"version": "3.11.2", "packages": {"kt_kernel": "0.1.0", "torch": "2.13.0", "sglang": "0.5.23"}}
{"asking": "kt_kernel"}
{"module": "kt_kernel", "facts": {"isa": "avx2", "version": ")" +
      version() + R"("}}
{"asking": "torch"}
{"module": "torch", "facts": {"version": "2.13.0+cu130", "cuda": "13.0", "gpus": "2"}}
{"asking": "sglang"}
{"module": "sglang", "facts": {}})");
  EXPECT_EQ(look("kt_kernel").found, version() + " (avx2)");
  EXPECT_EQ(look("torch").found, "2.13.0+cu130, CUDA 13.0, 2 GPUs");
  EXPECT_EQ(look("sglang").found, "0.5.23, its kt support loads");
  for (const Finding& f : d.findings) EXPECT_EQ(f.level, Level::kOk) << f.topic;
  EXPECT_EQ(d.facts["python"]["sglang"]["imported"], true);
  EXPECT_EQ(d.facts["python"]["kt_kernel"]["isa"], "avx2");
}

TEST_F(DoctorPython, QuickImportsNothing) {
  python_does(R"(case $3 in versions) echo '{"version": "3.11.2", )"
              R"("packages": {"torch": "2.13.0", "kt_kernel": "0.0.7"}}';; esac)");
  EXPECT_EQ(look("torch", PythonTest::kSkip).found, "2.13.0 (not imported)");
  EXPECT_THAT(look("kt_kernel", PythonTest::kSkip).found, HasSubstr("0.0.7 (not imported); this kt is"));
}

TEST_F(DoctorPython, VersionsOfKtKernel) {
  const std::string number = version().substr(0, version().find('+'));
  const auto level_of = [&](const std::string& other) {
    python_says(R"({"version": "3.11.2", "packages": {}}
{"module": "kt_kernel", "facts": {"isa": "amx", "version": ")" +
                other + R"("}})");
    return look("kt_kernel").level;
  };
  EXPECT_EQ(level_of(version()), Level::kOk);
  EXPECT_EQ(level_of(number), Level::kOk);  // of an archive without commits
  EXPECT_EQ(level_of(number + "+g0000000000"), version() == number ? Level::kOk : Level::kWarning);
  EXPECT_EQ(level_of("0.7.2"), Level::kWarning);
  EXPECT_THAT(look("kt_kernel").found, HasSubstr("0.7.2 (amx); this kt is " + version()));
}

TEST_F(DoctorPython, WhatCannotBeImported) {
  python_says(R"({"version": "3.11.2", "packages": {"kt_kernel": "0.1.0", "sglang": "0.5.23"}}
{"module": "kt_kernel", "problem": "ImportError: libx.so.1: no such file"}
{"module": "torch", "problem": "OSError: \u001b[31mbad"}
{"module": "sglang", "problem": "ImportError: this SGLang has no kt"})");
  EXPECT_EQ(look("kt_kernel").found, "0.1.0 cannot be imported: ImportError: libx.so.1: no such file");
  EXPECT_THAT(look("torch").found, HasSubstr("cannot be imported: OSError: \\x1b[31mbad"));
  EXPECT_THAT(look("sglang").found, HasSubstr("does not load: ImportError: this SGLang has no kt"));
  for (const char* topic : {"kt_kernel", "torch", "sglang"}) EXPECT_EQ(look(topic).level, Level::kWarning);
  EXPECT_EQ(d.facts["python"]["sglang"]["imported"], false);
}

TEST_F(DoctorPython, WhatHangsOrEndsThePythonIsNamed) {
  const std::string said = R"(echo '{"version": "3.11.2", "packages": {}}'; echo '{"asking": "kt_kernel"}')";
  python_does(said + "; kill -ILL $$");
  EXPECT_THAT(look("kt_kernel").found, HasSubstr("Python ended with signal 4"));
  machine.python_patience = std::chrono::milliseconds(1500);
  python_does(said + "; exec /bin/sleep 600");
  EXPECT_THAT(look("kt_kernel").found, HasSubstr("no answer within 1 s"));
  EXPECT_EQ(look("python").level, Level::kOk);
}

TEST_F(DoctorPython, TorchThatUsesNoGpu) {
  const auto torch = [&](const std::string& cuda) {
    python_says(R"({"version": "3.11.2", "packages": {}}
{"module": "torch", "facts": {"version": "2.13.0", "gpus": "0", "cuda": ")" +
                cuda + R"("}})");
    return look("torch");
  };
  EXPECT_EQ(torch("").found, "2.13.0, built without CUDA");
  EXPECT_EQ(torch("").level, Level::kOk);  // no GPU is here
  EXPECT_EQ(torch("13.0").level, Level::kOk);
  d.facts["cuda"] = {{"gpus", 1}};
  EXPECT_EQ(torch("").level, Level::kWarning);
  EXPECT_THAT(torch("").fix, HasSubstr("--index-url"));
  EXPECT_EQ(torch("13.0").level, Level::kWarning);
  EXPECT_THAT(torch("13.0").found, HasSubstr("no GPU usable"));
}

}  // namespace
}  // namespace kt::inline cli
