// The violin command: one verb per file beside this one.

#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cli/common.h"
#include "violin/text.h"
#include "violin/version.h"

namespace violin::cli {
namespace {

// CLI11's layout without its runs of empty lines.
class Help : public CLI::Formatter {
 public:
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override {
    std::string text = CLI::Formatter::make_help(app, std::move(name), mode);
    for (std::size_t at = 0; (at = text.find("\n\n\n", at)) != std::string::npos;) text.erase(at, 1);
    return text;
  }
};

// CLI11 ends the last line itself.
std::string version_lines() {
  std::string text = version_text();
  while (text.ends_with('\n')) text.pop_back();
  return text;
}

std::vector<std::string> verb_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(verb->get_name());
  return names;
}

// What CLI11 could not place: a verb or an option that does not exist, with the nearest one that does.
std::string unexpected(const CLI::App& verb, const std::string& word) {
  const std::vector<std::string> verbs = verb_names(verb);
  if (!word.starts_with("-"))
    return (verbs.empty() ? "unexpected argument " : "unknown verb ") + in_quotes(word) + did_you_mean(word, verbs);
  std::error_code ignored;
  if (std::filesystem::exists(word, ignored))
    return "unknown option " + in_quotes(word) + "; the file of this name is " + file_in_quotes("./" + word);
  std::vector<std::string> options;
  for (const CLI::Option* candidate : verb.get_options())
    for (const std::string& name : candidate->get_lnames()) options.push_back("--" + name);
  if (std::ranges::find(options, word.substr(0, word.find('='))) != options.end())
    return in_quotes(word) + " belongs behind the verb: " + verb.get_name() + " … " + word;
  return "unknown option " + in_quotes(word) + did_you_mean(word.substr(0, word.find('=')), options);
}

// CLI11's words for what is required, as everything else that is missing is named.
std::string missing(const CLI::App& verb, const std::string& text) {
  constexpr std::string_view kEnd = " is required";
  if (!text.ends_with(kEnd)) return text;
  const std::string what = text.substr(0, text.size() - kEnd.size());
  if (what != "A subcommand") return what + " is missing";
  std::string names;
  for (const std::string& name : verb_names(verb)) names += (names.empty() ? "" : ", ") + name;
  return "a verb is missing: " + names;
}

// The verb that the first words name, and these words: "violin bench model".
std::string named(const CLI::App& app, std::span<char* const> words) {
  const CLI::App* verb = &app;
  std::string name = "violin";
  for (const char* word : words.subspan(std::min<std::size_t>(1, words.size()))) {
    const auto matching = verb->get_subcommands([&](const CLI::App* one) { return one->get_name() == word; });
    if (matching.empty()) break;
    verb = matching.front();
    name += std::string(" ") + word;
  }
  return name;
}

// A file that is opened gets the lowest free number: with standard error closed, messages would land in it. What cannot
// be written to fails as the closed one did.
void keep_standard_streams() {
  for (int number = STDIN_FILENO; number <= STDERR_FILENO; ++number)
    if (::fcntl(number, F_GETFD) < 0 && errno == EBADF) ::open("/dev/null", O_RDONLY);
}

int run_command(int argc, char** argv) {
  CLI::App app("A learned spatial prior for vision transformers, built from space-filling curves.", "violin");
  app.set_help_flag("-h,--help", "Show this help");
  app.set_version_flag("--version", std::function<std::string()>(version_lines),
                       "Show versions and what this machine offers");
  const auto help = std::make_shared<Help>();
  help->column_width(26);
  help->label("SUBCOMMAND", "VERB");
  help->label("OPTIONS", "options");
  app.formatter(help);
  app.require_subcommand(0, 1);
  add_train(app);
  add_finetune(app);
  add_eval(app);
  add_predict(app);
  add_report(app);
  add_models(app);
  add_curves(app);
  add_mask(app);
  add_inspect(app);
  add_convert(app);
  add_features(app);
  add_bench(app);
  add_demo(app);
  app.footer(R"(Examples:
  violin demo                                         a tour on real images, in three minutes
  violin finetune --weights deit_small.safetensors --data photos --out runs/photos
  violin predict runs/photos new.jpg                  what is in a new image
  violin curves --grid 8x8 --set normal               four curves, drawn in the terminal
  violin curves --image photo.jpg --png curves.png    eight curves over the patches of a photo
  violin mask --gamma 0.98 --at 7,7 --png mask.png    the decay around a patch in the middle

Every verb explains itself: violin VERB --help)");

  return run(named(app, {argv, static_cast<std::size_t>(argc)}), [&] {
    try {
      app.parse(argc, argv);
    } catch (const CLI::Success& asked) {
      app.exit(asked);
      return;
    } catch (const CLI::ParseError& error) {
      const CLI::App* verb = &app;
      while (!verb->get_subcommands().empty()) verb = verb->get_subcommands().front();
      // What is required may be missing because it was taken for an option.
      std::vector<std::string> rest = app.remaining(true);
      std::erase(rest, "--");
      const bool misplaced = !rest.empty() && (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr ||
                                               dynamic_cast<const CLI::RequiredError*>(&error) != nullptr);
      throw Usage(misplaced ? unexpected(*verb, rest.front()) : missing(*verb, error.what()));
    }
    if (app.get_subcommands().empty()) throw Usage("a verb is missing");
  });
}

}  // namespace
}  // namespace violin::cli

int main(int argc, char** argv) {
  violin::cli::keep_standard_streams();
  return violin::cli::run_command(argc, argv);
}
