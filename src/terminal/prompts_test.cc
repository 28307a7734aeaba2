#include "terminal/prompts.h"

#include <gtest/gtest.h>

#include "terminal/testing/typed.h"

namespace kt::inline terminal {
namespace {

TEST(Prompts, TextTakesTheDefaultAndAsksAgain) {
  Typed typed("\n  b \n\n\nx\n");
  EXPECT_EQ(typed.prompts.ask_text({.question = "Q", .standard = "a"}), "a");
  EXPECT_EQ(typed.prompts.ask_text({.question = "Q", .standard = "a"}), "b");
  EXPECT_EQ(typed.prompts.ask_text({.question = "Q", .optional = true}), "");
  EXPECT_EQ(typed.prompts.ask_text({.question = "R"}), "x");
  EXPECT_NE(typed.shown().find("Q [a]: "), std::string::npos);
  EXPECT_NE(typed.shown().find("an answer is needed"), std::string::npos);
}

TEST(Prompts, ChoicesByNumberWordAndBeginning) {
  const Prompts::Choices asked{.question = "Q", .choices = {{"list"}, {"link"}, {"add"}}, .standard = 2};
  Typed typed("2\nadd\na\n\nli\n4\n0\nlist\n");
  EXPECT_EQ(typed.prompts.ask_choice(asked), "link");
  EXPECT_EQ(typed.prompts.ask_choice(asked), "add");
  EXPECT_EQ(typed.prompts.ask_choice(asked), "add");
  EXPECT_EQ(typed.prompts.ask_choice(asked), "add");
  EXPECT_EQ(typed.prompts.ask_choice(asked), "list") << "after 'li', 4 and 0, which mean nothing";
  EXPECT_NE(typed.shown().find("expected a number from 1 to 3 or a word of the list, got 'li'"),
            std::string::npos);
}

TEST(Prompts, NumbersStayInRange) {
  Typed typed("x\n0\n11\n1.5\n10\n\n");
  EXPECT_EQ(typed.prompts.ask_number("N", 3, 1, 10), 10);
  EXPECT_EQ(typed.prompts.ask_number("N", 3, 1, 10), 3);
}

TEST(Prompts, YesAndNo) {
  Typed typed("\n\ny\nNo\nmaybe\nyes\n");
  EXPECT_TRUE(typed.prompts.ask_yes("Q", true));
  EXPECT_FALSE(typed.prompts.ask_yes("Q", false));
  EXPECT_TRUE(typed.prompts.ask_yes("Q", false));
  EXPECT_FALSE(typed.prompts.ask_yes("Q", true));
  EXPECT_TRUE(typed.prompts.ask_yes("Q", false));
}

TEST(Prompts, TheEndOfInputEndsTheQuestions) {
  Typed typed("half a line");
  EXPECT_THROW(typed.prompts.ask_text({.question = "Q"}), PromptEnded);
}

TEST(Prompts, BytesThatAreNoTextAreRefused) {
  Typed typed("\xff\xfe\nok\n");
  EXPECT_EQ(typed.prompts.ask_text({.question = "Q"}), "ok");
}

}  // namespace
}  // namespace kt::inline terminal
