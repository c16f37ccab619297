#include "violin/viz/report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <map>

#include "violin/viz/html.h"
#include "violin/viz/resample.h"

namespace violin::viz {
namespace {

// Colours are variables, so that one rule turns the page dark. The palette keeps its order of lightness in both.
constexpr const char* kStyle = R"(
:root{--paper:#fff;--panel:#f6f5f2;--ink:#24212b;--soft:#6d6876;--rule:#e3e0da;--good:#1c7c54;--bad:#b3364b;
--c0:#3d4fb8;--c1:#c2466b;--c2:#1d8a80;--c3:#b6741a;--c4:#7a4fb0;--c5:#4d7f2f;--c6:#2d7cb5;--c7:#8a5a44}
@media(prefers-color-scheme:dark){:root{--paper:#17151c;--panel:#211e28;--ink:#ece8f2;--soft:#a39dae;--rule:#383343;
--good:#63c99a;--bad:#f08497;--c0:#8d9cf5;--c1:#f288a8;--c2:#5fcabf;--c3:#eab15c;--c4:#bd98ee;--c5:#9bcb78;--c6:#79bdee;--c7:#cfa28d}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;margin:0 0 4px}h2{font-size:19px;margin:40px 0 12px;padding-top:12px;border-top:1px solid var(--rule)}
h3{font-size:15px;margin:20px 0 8px}
p{margin:6px 0}.soft{color:var(--soft)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(320px,100%),1fr));gap:18px}
figure{margin:0;background:var(--panel);border-radius:8px;padding:12px;min-width:0}
figcaption{font-weight:600;margin-bottom:6px}
svg{width:100%;height:auto;display:block}
.rule{stroke:var(--rule);stroke-width:1}.tick{fill:var(--soft);font-size:11px}
.line{fill:none;stroke-width:2;stroke-linejoin:round}circle.line{fill:currentColor;stroke:none}.line.dashed{stroke-dasharray:5 4}
.c0{stroke:var(--c0);color:var(--c0)}.c1{stroke:var(--c1);color:var(--c1)}.c2{stroke:var(--c2);color:var(--c2)}
.c3{stroke:var(--c3);color:var(--c3)}.c4{stroke:var(--c4);color:var(--c4)}.c5{stroke:var(--c5);color:var(--c5)}
.c6{stroke:var(--c6);color:var(--c6)}.c7{stroke:var(--c7);color:var(--c7)}
.legend{font-size:12px;color:var(--soft)}.legend b{color:var(--ink);margin-right:10px}
.key{display:inline-block;width:18px;height:0;border-top:3px solid currentColor;vertical-align:middle;margin-right:5px}
.key.dashed{border-top-style:dashed}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:14px}td,th{padding:4px 12px 4px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule)}
th{color:var(--soft);font-weight:600}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.scene{max-width:100%;height:auto;background:#fff;border-radius:8px;display:block}
.pixels{image-rendering:pixelated}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(212px,1fr));gap:14px}
.card{background:var(--panel);border-radius:8px;padding:8px}.card div{display:flex;gap:4px}
.card img{width:96px;height:96px;border-radius:4px;object-fit:cover}
.card p{font-size:12.5px;margin:5px 0 0;overflow-wrap:anywhere}.good{color:var(--good)}.bad{color:var(--bad)}
.matrix{font-size:11px;border-spacing:1px;border-collapse:separate}.matrix td,.matrix th{padding:2px 3px;border:0;text-align:center}
.matrix th.l{text-align:right;white-space:nowrap}.matrix th.t{writing-mode:vertical-rl;transform:rotate(180deg);white-space:nowrap;text-align:left}
details{margin:10px 0}summary{cursor:pointer;font-weight:600}
)";

std::string number(double value, const char* format) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

std::string thousands(std::int64_t value) {
  std::string text = std::to_string(value);
  for (std::int64_t at = static_cast<std::int64_t>(text.size()) - 3; at > 0; at -= 3)
    text.insert(static_cast<std::size_t>(at), ",");
  return text;
}

std::string table(const std::vector<std::pair<std::string, std::string>>& rows) {
  std::string html = "<div class=\"scroll\"><table>";
  for (const auto& [name, value] : rows)
    html += "<tr><th>" + escape_html(name) + "</th><td>" + escape_html(value) + "</td></tr>";
  return html + "</table></div>";
}

std::string charts(const std::vector<RunReport>& runs) {
  const bool many = runs.size() > 1;
  LineChart loss{"Loss", "", {}, false}, accuracy{"Accuracy on val", "%", {}, false},
      rate{"Learning rate", "", {}, true};
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const auto color = static_cast<int>(i);
    const std::string prefix = many ? runs[i].name + " " : "";
    Series train{prefix + "train", {}, {}, many ? color : 0, many},
        val{prefix + "val", {}, {}, many ? color : 1, false};
    Series top1{many ? runs[i].name : "top-1", {}, {}, many ? color : 2, false};
    Series lr{many ? runs[i].name : "at the end of the epoch", {}, {}, many ? color : 3, false};
    for (const EpochRow& row : runs[i].epochs) {
      train.x.push_back(row.epoch), train.y.push_back(row.train_loss);
      lr.x.push_back(row.epoch), lr.y.push_back(row.lr);
      if (row.val_loss) val.x.push_back(row.epoch), val.y.push_back(*row.val_loss);
      if (row.val_top1) top1.x.push_back(row.epoch), top1.y.push_back(*row.val_top1);
    }
    loss.series.push_back(std::move(train));
    if (!val.x.empty()) loss.series.push_back(std::move(val));
    if (!top1.x.empty()) accuracy.series.push_back(std::move(top1));
    rate.series.push_back(std::move(lr));
  }
  return "<div class=\"charts\">" + line_chart(loss) + line_chart(accuracy) + line_chart(rate) + "</div>";
}

std::string spread_text(const std::vector<double>& values) {
  if (values.empty()) return "–";
  const Spread s = spread(values);
  return number(s.mean, "%.2f") + (s.deviation ? " ± " + number(*s.deviation, "%.2f") : "") + "%";
}

// One row per group of runs that differ in their seed only.
std::string comparison(const std::vector<RunReport>& runs) {
  std::map<std::string, std::vector<const RunReport*>> groups;
  std::vector<std::string> order;
  for (const RunReport& run : runs) {
    if (!groups.contains(run.group)) order.push_back(run.group);
    groups[run.group].push_back(&run);
  }
  std::string html =
      "<h2>Side by side</h2><div class=\"scroll\"><table><tr><th>runs</th><th class=n>seeds</th><th class=n>val "
      "top-1</th>"
      "<th class=n>test top-1</th><th class=n>parameters</th><th class=n>of the mask</th><th "
      "class=n>images/s</th></tr>";
  for (const std::string& name : order) {
    const std::vector<const RunReport*>& members = groups.at(name);
    std::vector<double> val, test;
    double speed = 0;
    std::string names;
    for (const RunReport* run : members) {
      if (run->best_top1) val.push_back(*run->best_top1);
      if (run->test_top1) test.push_back(*run->test_top1);
      speed += run->images_per_second / static_cast<double>(members.size());
      names += (names.empty() ? "" : ", ") + run->name;
    }
    html += "<tr><td>" + escape_html(names) + "</td><td class=n>" + std::to_string(members.size()) +
            "</td><td class=n>" + spread_text(val) + "</td><td class=n>" + spread_text(test) + "</td><td class=n>" +
            thousands(members.front()->parameters) + "</td><td class=n>" + thousands(members.front()->mask_parameters) +
            "</td><td class=n>" + number(speed, "%.0f") + "</td></tr>";
  }
  return html +
         "</table></div><p class=\"soft\">± is the sample deviation over seeds. Val chose the epoch; test is the "
         "weights "
         "of that epoch.</p>";
}

std::string card(const Prediction& p) {
  const bool small = p.image.width < 64;
  const std::int64_t side = std::min<std::int64_t>(std::max<std::int64_t>(p.image.width, 96), 160);
  const Image base = small ? enlarge(p.image, side, side) : resize(p.image, side, side);
  return "<div class=\"card\"><div>" + embedded(small ? p.image : base, p.name, small) +
         embedded(overlay(base, p.attention), "attention on " + p.name, false) + "</div><p><b class=\"" +
         (p.right ? "good" : "bad") + "\">" + escape_html(p.guess) + "</b> " + number(100 * p.probability, "%.0f%%") +
         (p.right ? "" : " · is " + escape_html(p.label)) + "</p><p class=\"soft\">" + escape_html(p.name) +
         "</p></div>";
}

std::string cards(const std::string& title, const std::vector<Prediction>& predictions) {
  if (predictions.empty()) return "";
  std::string html = "<h3>" + escape_html(title) + "</h3><div class=\"cards\">";
  for (const Prediction& p : predictions) html += card(p);
  return html + "</div>";
}

std::string confusion(const RunReport& run) {
  constexpr std::size_t kMaxMatrix = 24;
  const std::size_t classes = run.confusion.size();
  if (classes == 0 || run.classes.size() != classes) return "";
  if (classes > kMaxMatrix) {
    struct Pair {
      std::int64_t count;
      std::size_t label, guess;
    };
    std::vector<Pair> pairs;
    for (std::size_t i = 0; i < classes; ++i)
      for (std::size_t j = 0; j < classes; ++j)
        if (i != j && run.confusion[i][j] > 0) pairs.push_back({run.confusion[i][j], i, j});
    std::stable_sort(pairs.begin(), pairs.end(), [](const Pair& a, const Pair& b) { return a.count > b.count; });
    std::string html =
        "<h3>Most frequent confusions</h3><div class=\"scroll\"><table><tr><th>is</th><th>was taken for</th><th "
        "class=n>images</th></tr>";
    for (std::size_t i = 0; i < std::min<std::size_t>(pairs.size(), 15); ++i)
      html += "<tr><td>" + escape_html(run.classes[pairs[i].label]) + "</td><td>" +
              escape_html(run.classes[pairs[i].guess]) + "</td><td class=n>" + std::to_string(pairs[i].count) +
              "</td></tr>";
    return html + "</table></div>";
  }
  std::string html =
      "<h3>Confusion (rows: what it is; columns: what the model said)</h3><div class=\"scroll\"><table "
      "class=\"matrix\"><tr><th></th>";
  for (const std::string& name : run.classes) html += "<th class=t>" + escape_html(name) + "</th>";
  html += "</tr>";
  for (std::size_t i = 0; i < classes; ++i) {
    std::int64_t sum = 0;
    for (const std::int64_t count : run.confusion[i]) sum += count;
    html += "<tr><th class=l>" + escape_html(run.classes[i]) + "</th>";
    for (std::size_t j = 0; j < classes; ++j) {
      const double share = sum == 0 ? 0 : static_cast<double>(run.confusion[i][j]) / static_cast<double>(sum);
      const char* color = i == j ? "var(--good)" : "var(--bad)";
      html += "<td style=\"background:color-mix(in srgb," + std::string(color) + " " +
              number(100 * std::sqrt(share) * 0.75, "%.0f") + "%,var(--panel))\">" +
              (run.confusion[i][j] > 0 ? std::to_string(run.confusion[i][j]) : "") + "</td>";
    }
    html += "</tr>";
  }
  return html + "</table></div>";
}

std::string section(const RunReport& run, bool many) {
  std::string html = many ? "<h2>" + escape_html(run.name) + "</h2>" : "";
  html += table(run.facts);
  for (const std::string& note : run.notes) html += "<p class=\"soft\">" + escape_html(note) + "</p>";
  if (!many) html += "<h2>Training</h2>" + charts({run});
  if (run.decay) {
    html += (many ? "<h3>" : "<h2>") + std::string("What the mask learned") + (many ? "</h3>" : "</h2>") +
            "<div class=\"scroll\">" + embedded(decay_chart(*run.decay), "decay per layer, head and curve") + "</div>";
    if (run.masks)
      html += "<h3>The mask around three patches</h3><div class=\"scroll\">" +
              embedded(*run.masks, "masks of chosen heads") + "</div>";
  }
  if (!run.best.empty() || !run.worst.empty() || !run.confusion.empty()) {
    html += (many ? "<h3>" : "<h2>") + std::string("Predictions") + (many ? "</h3>" : "</h2>");
    html += cards("Surest and right", run.best) + cards("Surest and wrong", run.worst) + confusion(run);
  }
  return html + "<details><summary>All options</summary>" + table(run.options) + "</details>";
}

// The same images in every run, run by run below each other.
std::string shared_images(const std::vector<RunReport>& runs) {
  std::string html;
  for (const RunReport& run : runs)
    if (!run.shared.empty()) html += cards(run.name, run.shared);
  return html.empty() ? "" : "<h2>The same images</h2>" + html;
}

}  // namespace

Spread spread(const std::vector<double>& values) {
  Spread result;
  result.count = values.size();
  if (values.empty()) return result;
  for (const double value : values) result.mean += value / static_cast<double>(values.size());
  if (values.size() < 2) return result;
  double squares = 0;
  for (const double value : values) squares += (value - result.mean) * (value - result.mean);
  result.deviation = std::sqrt(squares / static_cast<double>(values.size() - 1));
  return result;
}

std::string report_html(const Report& report) {
  const bool many = report.runs.size() > 1;
  std::string html =
      "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width,initial-scale=1\"><meta name=\"color-scheme\" content=\"light dark\"><title>" +
      escape_html(report.title) + "</title><style>" + kStyle + "</style></head><body><main><h1>" +
      escape_html(report.title) + "</h1>";
  if (many) html += comparison(report.runs) + "<h2>Training</h2>" + charts(report.runs) + shared_images(report.runs);
  for (const RunReport& run : report.runs) html += section(run, many);
  if (report.curves)
    html += "<h2>The curves</h2><div class=\"scroll\">" + embedded(*report.curves, "space-filling curves") + "</div>";
  return html + "<p class=\"soft\">" + escape_html(report.footer) + "</p></main></body></html>\n";
}

}  // namespace violin::viz
