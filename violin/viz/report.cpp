#include "violin/viz/report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <map>

#include "violin/number_text.h"
#include "violin/viz/html.h"
#include "violin/viz/report_style.h"
#include "violin/viz/resample.h"

namespace violin::viz {
namespace {

constexpr std::size_t kPictureBytes = 3'800'000;  // of 5 MB that a page may have
constexpr std::size_t kMatrixClasses = 30;        // a table with more cells is not read

using Rows = std::vector<std::pair<std::string, std::string>>;

std::string percent(const std::optional<double>& value) {
  return value ? number_text(*value, "%.2f%%") : "–";
}

std::string thousands(std::int64_t value) {
  std::string text = std::to_string(value);
  for (std::int64_t at = static_cast<std::int64_t>(text.size()) - 3; at > 0; at -= 3)
    text.insert(static_cast<std::size_t>(at), ",");
  return text;
}

std::string soft(const std::string& text) {
  return "<p class=\"soft\">" + escape_html(text) + "</p>";
}

// A heading and the sentence that says what is shown.
std::string heading(const std::string& tag, const std::string& title, const std::string& explanation) {
  return "<" + tag + ">" + escape_html(title) + "</" + tag + ">" + (explanation.empty() ? "" : soft(explanation));
}

std::string table(const Rows& rows) {
  std::string html = "<div class=\"scroll\"><table>";
  for (const auto& [name, value] : rows)
    html += "<tr><th>" + escape_html(name) + "</th><td>" + escape_html(value) + "</td></tr>";
  return html + "</table></div>";
}

std::string details(const std::string& title, const std::string& content) {
  return "<details><summary>" + escape_html(title) + "</summary>" + content + "</details>";
}

class Page {
 public:
  explicit Page(const Report& report) : report_(report), runs_(report.runs), many_(report.runs.size() > 1) {
    std::vector<RunScore> scores;
    scores.reserve(runs_.size());
    for (const RunReport& run : runs_) scores.push_back(run.score);
    groups_ = compare(scores);
    group_of_.resize(runs_.size());
    for (std::size_t g = 0; g < groups_.size(); ++g)
      for (const std::size_t i : groups_[g].members) group_of_[i] = g;
  }

  std::string html() {
    std::string body = many_ ? several() : single();
    if (!report_.curves.empty()) {
      body +=
          heading("h2", "The curves",
                  "Each curve lines the patches of the image up in another sequence. A mask fades with the distance "
                  "along the line, from the filled dot to the open one.");
      for (const Scene& gallery : report_.curves) body += pictures_.scene(gallery, "space-filling curves");
    }
    if (pictures_.left_out() > 0)
      body += soft(std::to_string(pictures_.left_out()) + " pictures were left out to keep this page below 5 MB.");
    // Even a name that slipped through could neither run nor load anything.
    return "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta "
           "http-equiv=\"Content-Security-Policy\" "
           "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\"><meta name=\"viewport\" "
           "content=\"width=device-width,initial-scale=1\"><meta name=\"color-scheme\" content=\"light dark\"><title>" +
           escape_html(report_.title) + "</title><style>" + kReportStyle + pictures_.styles() +
           "</style></head><body><main><h1>" + escape_html(report_.title) + "</h1>" + body + soft(report_.footer) +
           "</main></body></html>\n";
  }

 private:
  std::string single() {
    const RunReport& run = runs_.front();
    const RunScore& score = run.score;
    const auto tile = [](const std::string& value, const std::string& name) {
      return "<div><b>" + escape_html(value) + "</b><span>" + escape_html(name) + "</span></div>";
    };
    std::string html = "<div class=\"tiles\">";
    if (score.test_top1)
      html += tile(percent(score.test_top1), "of " + thousands(score.test_images) + " test images right");
    html += tile(percent(score.val_top1), "best on validation images") +
            tile(thousands(score.parameters), "parameters") +
            tile(thousands(score.mask_parameters), "of them in the mask") +
            tile(number_text(score.images_per_second, "%.0f"), "training images a second") + "</div>";
    html += notes(run.notes) + heading("h2", "Configuration", "") + table(run.facts) +
            details("All options", table(run.options));
    html +=
        heading("h2", "Training",
                "After every epoch: the loss on the images that are learned from and on validation images, which are "
                "not; the share of validation images that are named right; the step size.") +
        charts();
    if (run.decay) html += mask_section(run, *run.decay, "h2");
    return html + predictions(run, "h2");
  }

  std::string several() {
    std::string html = notes(report_.notes) + comparison();
    html +=
        heading("h2", "Training",
                "One line per run, one colour for runs that differ in their seed only. Dashed: the loss on the images "
                "that are learned from; solid: on validation images.") +
        charts();
    html += decays() + shared_images();
    html += heading("h2", "Run by run", "Configuration, masks, predictions and confusion of each run.");
    for (const RunReport& run : runs_) {
      std::string content = notes(run.notes) + table(run.facts) + details("All options", table(run.options));
      if (run.decay) content += mask_section(run, *run.decay, "h3");
      html += "<details class=\"run\"><summary>" + escape_html(run.score.name) + "</summary>" + content +
              predictions(run, "h3") + "</details>";
    }
    return html;
  }

  static std::string notes(const std::vector<std::string>& lines) {
    std::string html;
    for (const std::string& note : lines) html += "<p class=\"note\">" + escape_html(note) + "</p>";
    return html;
  }

  std::string charts() {
    LineChart loss{"Loss", "", "epoch", {}, false, !many_},
        accuracy{"Right on validation", "%", "epoch", {}, false, !many_},
        rate{"Learning rate", "", "epoch", {}, true, !many_};
    for (std::size_t i = 0; i < runs_.size(); ++i) {
      const auto color = static_cast<int>(group_of_[i]);
      const std::string name = group_entry(i);
      Series train{many_ ? "" : "train", {}, {}, many_ ? color : 0, many_};
      Series val{many_ ? name : "validation", {}, {}, many_ ? color : 1, false};
      Series top1{many_ ? name : "top-1", {}, {}, many_ ? color : 2, false};
      Series lr{many_ ? name : "end of epoch", {}, {}, many_ ? color : 3, false};
      for (const EpochRow& row : runs_[i].epochs) {
        train.x.push_back(row.epoch), train.y.push_back(row.train_loss);
        lr.x.push_back(row.epoch), lr.y.push_back(row.lr);
        if (row.val_loss) val.x.push_back(row.epoch), val.y.push_back(*row.val_loss);
        if (row.val_top1) top1.x.push_back(row.epoch), top1.y.push_back(*row.val_top1);
      }
      if (val.x.empty() && many_) train.name = name;
      loss.series.push_back(std::move(train));
      if (!val.x.empty()) loss.series.push_back(std::move(val));
      if (!top1.x.empty()) accuracy.series.push_back(std::move(top1));
      rate.series.push_back(std::move(lr));
    }
    return "<div class=\"charts\">" + line_chart(loss) + line_chart(accuracy) + line_chart(rate) + "</div>";
  }

  // The name of the group at its first run, so that a legend has it once.
  std::string group_entry(std::size_t run) const {
    const RunGroup& group = groups_[group_of_[run]];
    return group.members.front() == run ? group.name : "";
  }

  std::string comparison() {
    const RunGroup& reference =
        *std::find_if(groups_.begin(), groups_.end(), [](const RunGroup& g) { return g.reference; });
    std::string html =
        heading(
            "h2", "Side by side",
            "Top-1 is the share of images whose first guess is right. ± is the sample deviation over seeds. Validation "
            "images choose the epoch; test images are used once, with the weights of that epoch.") +
        "<div class=\"scroll\"><table class=\"sticky\"><tr><th>runs</th><th class=n>seeds</th><th class=n>test "
        "top-1</th><th>each "
        "seed</th><th class=n>against " +
        escape_html(reference.name) +
        "</th><th class=n>validation top-1</th><th class=n>parameters</th><th class=n>of the mask</th><th "
        "class=n>images/s</th></tr>";
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      const RunGroup& group = groups_[g];
      std::string each;
      for (const std::size_t i : group.members) {
        const RunScore& score = runs_[i].score;
        if (score.test_top1) each += (each.empty() ? "" : ", ") + number_text(*score.test_top1, "%.2f");
      }
      html += "<tr><td class=g><span class=\"key c" + std::to_string(g % 8) + "\"></span>" + escape_html(group.name) +
              "</td><td class=n>" + std::to_string(group.seeds) + "</td><td class=n>" + to_string(group.test) +
              (group.test.count > 0 ? "%" : "") + "</td><td class=g>" + (each.empty() ? "–" : each) +
              "</td><td class=n>" + (group.reference ? "" : to_string(group.difference, true)) + "</td><td class=n>" +
              to_string(group.val) + (group.val.count > 0 ? "%" : "") + "</td><td class=n>" +
              thousands(group.parameters) + "</td><td class=n>" + thousands(group.mask_parameters) +
              "</td><td class=n>" + number_text(group.images_per_second, "%.0f") + "</td></tr>";
    }
    html += "</table></div><ul>";
    const std::int64_t images = runs_.front().score.test_images;
    for (const RunGroup& group : groups_)
      if (!group.reference) html += "<li>" + escape_html(verdict(group, reference, images)) + "</li>";
    if (images > 0 && reference.test.count > 0) {
      const double share = reference.test.mean / 100;
      html += "<li>" +
              escape_html(thousands(images) + " test images alone leave an accuracy uncertain by about ±" +
                          number_text(100 * std::sqrt(share * (1 - share) / static_cast<double>(images)), "%.1f") +
                          " points (one standard error), whatever the seeds say.") +
              "</li>";
    }
    return html + "</ul>" + differing_options();
  }

  // One column per group; what differs inside a group, such as the seed, is listed.
  std::string differing_options() {
    std::vector<std::string> keys;
    std::map<std::string, std::vector<std::string>> values;  // [groups]
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      for (const std::size_t i : groups_[g].members) {
        for (const auto& [key, value] : runs_[i].options) {
          if (!values.contains(key)) keys.push_back(key), values[key].resize(groups_.size());
          std::string& cell = values[key][g];
          if (i == groups_[g].members.front()) {
            cell = value;
          } else if (cell != value) {
            cell += ", " + value;
          }
        }
      }
    }
    std::string rows;
    for (const std::string& key : keys) {
      const std::vector<std::string>& row = values[key];
      if (std::count(row.begin(), row.end(), row.front()) == static_cast<std::ptrdiff_t>(row.size())) continue;
      rows += "<tr><th>" + escape_html(key) + "</th>";
      for (const std::string& value : row)
        rows += "<td class=wrap>" + (value.empty() ? "–" : escape_html(value)) + "</td>";
      rows += "</tr>";
    }
    if (rows.empty()) return "";
    std::string head;
    for (const RunGroup& group : groups_) head += "<th class=g>" + escape_html(group.name) + "</th>";
    return heading("h3", "Options that differ",
                   "All others are the same; groups differ in these, runs of a group in their seed.") +
           "<div class=\"scroll\"><table class=\"sticky\"><tr><th></th>" + head + "</tr>" + rows + "</table></div>";
  }

  std::string mask_section(const RunReport& run, const DecayChart& decay, const std::string& tag) {
    std::string html =
        heading(tag, "What the mask learned",
                "The mask multiplies the attention between two patches. Along a curve it falls by the factor γ with "
                "each step, so "
                "γ near 1 lets a head see far and a small γ keeps it near; α scales the whole mask of a head. Both are "
                "learned.");
    if (!many_) html += pictures_.scene(decay_chart(decay), "decay per layer, head and curve");
    if (run.means && run.means->heads <= 8) {
      html += "<div class=\"charts\">" +
              by_layer("Mean of the mask, by head", run.means->blocks, run.means->heads, run.means->values, true);
      if (!decay.alpha.empty()) html += by_layer("α, by head", decay.blocks, decay.heads, decay.alpha, false);
      html += "</div>";
    }
    html += details("γ and α as numbers", decay_numbers(decay));
    if (run.masks)
      html +=
          heading("h3", "The mask around three patches",
                  "Chosen heads from the shortest reach to the longest. Each panel is the image; bright patches are "
                  "those that the framed patch may attend to with full strength.") +
          pictures_.scene(*run.masks, "masks of chosen heads around three patches");
    return html;
  }

  static std::string by_layer(const std::string& title, const std::vector<std::int64_t>& blocks, std::int64_t heads,
                              const std::vector<double>& values, bool from_zero) {
    LineChart chart{title, "", "layer", {}, from_zero, false};
    for (std::int64_t h = 0; h < heads; ++h) {
      Series series{"head " + std::to_string(h), {}, {}, static_cast<int>(h), false};
      for (std::size_t l = 0; l < blocks.size(); ++l) {
        series.x.push_back(static_cast<double>(blocks[l]));
        series.y.push_back(values[l * static_cast<std::size_t>(heads) + static_cast<std::size_t>(h)]);
      }
      chart.series.push_back(std::move(series));
    }
    return line_chart(chart);
  }

  static std::string decay_numbers(const DecayChart& chart) {
    const auto heads = static_cast<std::size_t>(chart.heads);
    std::string html = "<div class=\"scroll\"><table class=\"small\"><tr><th>layer</th><th>head</th>";
    for (const std::string& name : chart.curves) html += "<th class=n>γ " + escape_html(name) + "</th>";
    html += chart.alpha.empty() ? "</tr>" : "<th class=n>α</th></tr>";
    for (std::size_t l = 0; l < chart.blocks.size(); ++l) {
      for (std::size_t h = 0; h < heads; ++h) {
        html += "<tr><td>" + std::to_string(chart.blocks[l]) + "</td><td>" + std::to_string(h) + "</td>";
        for (std::size_t c = 0; c < chart.curves.size(); ++c)
          html += "<td class=n>" +
                  number_text(std::exp(chart.log_gamma[(l * chart.curves.size() + c) * heads + h]), "%.4f") + "</td>";
        if (!chart.alpha.empty()) html += "<td class=n>" + number_text(chart.alpha[l * heads + h], "%.4f") + "</td>";
        html += "</tr>";
      }
    }
    return html + "</table></div>";
  }

  // Means of mask and alpha by layer, then every run's decays on one scale of colours.
  std::string decays() {
    LineChart mean{"Mean of the mask", "", "layer", {}, true, false},
        alpha{"α, mean over heads", "", "layer", {}, false, false};
    std::vector<DecayChart> charts;
    std::vector<bool> named_mean(groups_.size()), named_alpha(groups_.size());
    const auto line = [&](std::size_t run, const std::vector<std::int64_t>& blocks, std::int64_t heads,
                          const std::vector<double>& values, std::vector<bool>& named) {
      const std::size_t group = group_of_[run];
      Series series{named[group] ? "" : groups_[group].name, {}, {}, static_cast<int>(group), false};
      named[group] = true;
      for (std::size_t l = 0; l < blocks.size(); ++l) {
        const auto begin = values.begin() + static_cast<std::ptrdiff_t>(l) * heads;
        double sum = 0;
        for (auto value = begin; value != begin + heads; ++value) sum += *value;
        series.x.push_back(static_cast<double>(blocks[l]));
        series.y.push_back(sum / static_cast<double>(heads));
      }
      return series;
    };
    for (std::size_t i = 0; i < runs_.size(); ++i) {
      const RunReport& run = runs_[i];
      if (!run.decay) continue;
      charts.push_back(*run.decay);
      if (run.means) mean.series.push_back(line(i, run.means->blocks, run.means->heads, run.means->values, named_mean));
      if (!run.decay->alpha.empty())
        alpha.series.push_back(line(i, run.decay->blocks, run.decay->heads, run.decay->alpha, named_alpha));
    }
    if (charts.empty()) return "";
    std::vector<DecayChart*> pointers;
    pointers.reserve(charts.size());
    for (DecayChart& chart : charts) pointers.push_back(&chart);
    share_scale(pointers);
    std::string html = heading(
        "h2", "What the masks learned",
        "The mask multiplies the attention between two patches; it falls by the factor γ with each step along a "
        "curve, and α scales it. Its mean over all pairs of patches is 1 where a head is free to look anywhere and "
        "near 0 where only neighbours count. Equal colours are equal values in all pictures.");
    html += "<div class=\"charts\">" + (mean.series.empty() ? "" : line_chart(mean)) +
            (alpha.series.empty() ? "" : line_chart(alpha)) + "</div><div class=\"pairs\">";
    for (const DecayChart& chart : charts)
      html += pictures_.scene(decay_chart(chart), "decay per layer, head and curve");
    return html + "</div>";
  }

  // The image, and the attention on it if asked for.
  std::string look(const Prediction& p, bool attention) {
    constexpr std::int64_t kShown = 112;  // pixels of the longer side, at most
    const std::int64_t width = p.image.width, height = p.image.height, longer = std::max(width, height);
    const bool small = longer < 64;
    const auto scaled = [&](std::int64_t side) { return std::max<std::int64_t>(side * kShown / longer, 1); };
    const std::string image =
        pictures_.background(longer <= kShown ? p.image : resize(p.image, scaled(width), scaled(height)));
    if (image.empty()) return "<span class=\"look empty\"></span>";
    std::string heat;
    if (attention && !p.attention.values.empty()) {
      Image map(p.attention.width, p.attention.height);
      for (std::int64_t y = 0; y < map.height; ++y)
        for (std::int64_t x = 0; x < map.width; ++x)
          set_pixel(map, x, y, mask_color(p.attention.values[static_cast<std::size_t>(y * map.width + x)]));
      const std::string name = pictures_.background(map);
      if (!name.empty()) heat = "<i class=\"" + name + "\"></i>";
    }
    const std::string proportions =
        width == height ? "" : " style=\"aspect-ratio:" + std::to_string(width) + "/" + std::to_string(height) + "\"";
    return "<span class=\"look " + std::string(small ? "pixels " : "") + image + "\"" + proportions +
           " role=\"img\" aria-label=\"" + escape_html((attention ? "attention on " : "") + p.name) + "\">" + heat +
           "</span>";
  }

  static std::string answer(const Prediction& p) {
    return "<b class=\"" + std::string(p.right ? "good" : "bad") + "\">" + (p.right ? "✓ " : "✗ ") +
           escape_html(p.guess) + "</b> " + number_text(100 * p.probability, "%.0f%%");
  }

  std::string cards(const std::string& title, const std::string& explanation, const std::vector<Prediction>& list) {
    if (list.empty()) return "";
    std::string html = heading("h3", title, explanation) + "<div class=\"cards\">";
    for (const Prediction& p : list)
      html += "<div class=\"card\"><div>" + look(p, false) + look(p, true) + "</div><p>" + answer(p) +
              (p.right ? "" : " · is " + escape_html(p.label)) + "</p><p class=\"soft name\" title=\"" +
              escape_html(p.name) + "\">" + escape_html(p.name) + "</p></div>";
    return html + "</div>";
  }

  // Rows are images, columns are runs.
  std::string shared_images() {
    std::vector<const RunReport*> shown;
    for (const RunReport& run : runs_)
      if (!run.shared.empty()) shown.push_back(&run);
    if (shown.size() < 2) return "";
    std::string rows;
    for (const Prediction& first : shown.front()->shared) {
      std::string row;
      std::size_t found = 0;
      for (const RunReport* run : shown) {
        const auto same =
            std::find_if(run->shared.begin(), run->shared.end(), [&](const Prediction& p) { return p.id == first.id; });
        row += "<td>";
        if (same != run->shared.end()) row += look(*same, true) + answer(*same), ++found;
        row += "</td>";
      }
      if (found > 1) rows += "<tr><th>" + look(first, false) + escape_html(first.label) + "</th>" + row + "</tr>";
    }
    if (rows.empty()) return "";
    std::string html =
        heading(
            "h2", "The same images",
            "Left, what the models saw and what it is. Beside it, for each run, where its last block looked (bright), "
            "its first guess and how sure it is.") +
        "<div class=\"scroll\"><table class=\"same sticky\"><tr><th></th>";
    for (const RunReport* run : shown) html += "<td>" + escape_html(run->score.name) + "</td>";
    return html + "</tr>" + rows + "</table></div>";
  }

  std::string predictions(const RunReport& run, const std::string& tag) {
    if (run.best.empty() && run.worst.empty() && run.confusion.empty()) return "";
    return heading(tag, "Predictions",
                   "On " + run.predicted +
                       ". Left, what the model saw; right, the same image with the attention of the last block on it: "
                       "bright where it looked.") +
           cards("Surest and right", "", run.best) + cards("Surest and wrong", "", run.worst) + confusion(run);
  }

  static std::string confusion(const RunReport& run) {
    const std::size_t classes = std::min(run.confusion.size(), run.classes.size());
    if (classes == 0) return "";
    if (classes > kMatrixClasses) {
      struct Pair {
        std::size_t label, guess;
        std::int64_t count;
      };
      std::vector<Pair> pairs;
      for (std::size_t i = 0; i < classes; ++i)
        for (std::size_t j = 0; j < classes; ++j)
          if (i != j && run.confusion[i][j] > 0) pairs.push_back({i, j, run.confusion[i][j]});
      std::stable_sort(pairs.begin(), pairs.end(), [](const Pair& a, const Pair& b) { return a.count > b.count; });
      std::string html = heading("h3", "Most frequent confusions", "") +
                         "<div class=\"scroll\"><table><tr><th>is</th><th>was taken for</th><th "
                         "class=n>images</th></tr>";
      for (std::size_t i = 0; i < std::min<std::size_t>(pairs.size(), 15); ++i)
        html += "<tr><td>" + escape_html(run.classes[pairs[i].label]) + "</td><td>" +
                escape_html(run.classes[pairs[i].guess]) + "</td><td class=n>" + std::to_string(pairs[i].count) +
                "</td></tr>";
      return html + "</table></div>";
    }
    std::string html =
        heading("h3", "Confusion",
                "Rows: what the images show. Columns: what the model said. Green is right; the last column "
                "is the share of the row that is.") +
        "<div class=\"scroll\"><table class=\"matrix\"><tr><td></td>";
    for (std::size_t j = 0; j < classes; ++j)
      html += "<th class=t><span>" + escape_html(run.classes[j]) + "</span></th>";
    html += "<td></td></tr>";
    for (std::size_t i = 0; i < classes; ++i) {
      std::int64_t sum = 0;
      for (const std::int64_t count : run.confusion[i]) sum += count;
      const auto share = [&](std::size_t j) {
        return sum == 0 ? 0 : static_cast<double>(run.confusion[i][j]) / static_cast<double>(sum);
      };
      html += "<tr><th class=l>" + escape_html(run.classes[i]) + "</th>";
      for (std::size_t j = 0; j < classes; ++j) {
        if (run.confusion[i][j] == 0) {
          html += "<td></td>";
          continue;
        }
        html += "<td" + std::string(i == j ? " class=d" : "") +
                " style=\"--s:" + number_text(100 * std::sqrt(share(j)) * 0.75, "%.0f%%") + "\">" +
                std::to_string(run.confusion[i][j]) + "</td>";
      }
      html += "<th class=r>" + (sum == 0 ? "–" : number_text(100 * share(i), "%.0f%%")) + "</th></tr>";
    }
    return html + "</table></div>";
  }

  const Report& report_;
  const std::vector<RunReport>& runs_;
  bool many_;
  std::vector<RunGroup> groups_;
  std::vector<std::size_t> group_of_;
  Pictures pictures_{kPictureBytes};
};

}  // namespace

std::string report_html(const Report& report) {
  return Page(report).html();
}

}  // namespace violin::viz
