// The style sheet of the report. Colours are variables, so that one rule turns the page dark; the palette keeps its
// order of lightness in both.
#pragma once

namespace violin::viz {

inline constexpr const char* kReportStyle = R"(
:root{--paper:#fff;--panel:#f6f5f2;--ink:#24212b;--soft:#676270;--rule:#e0dcd5;--good:#17704b;--bad:#b3364b;
--c0:#3d4fb8;--c1:#c2466b;--c2:#1d8a80;--c3:#b6741a;--c4:#7a4fb0;--c5:#4d7f2f;--c6:#2d7cb5;--c7:#8a5a44}
@media(prefers-color-scheme:dark){:root{--paper:#17151c;--panel:#211e28;--ink:#ece8f2;--soft:#aaa4b6;--rule:#3d384a;
--good:#63c99a;--bad:#f08497;--c0:#8d9cf5;--c1:#f288a8;--c2:#5fcabf;--c3:#eab15c;--c4:#bd98ee;--c5:#9bcb78;--c6:#79bdee;
--c7:#cfa28d}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
-webkit-print-color-adjust:exact;print-color-adjust:exact}
main{max-width:1160px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:28px;margin:0 0 8px;overflow-wrap:anywhere}
h2{font-size:20px;margin:40px 0 6px;padding-top:14px;border-top:1px solid var(--rule)}
h3{font-size:16px;margin:24px 0 6px}
p{margin:6px 0 10px;max-width:78ch}.soft{color:var(--soft)}
.note{border-left:3px solid var(--c3);padding-left:10px}ul{margin:12px 0;padding-left:20px}li{margin:4px 0;max-width:78ch}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:14px 0}
.tiles div{background:var(--panel);border-radius:8px;padding:10px 14px}.tiles b{display:block;font-size:22px}
.tiles span{color:var(--soft);font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(320px,100%),1fr));gap:16px;margin:12px 0}
figure{margin:0;background:var(--panel);border-radius:8px;padding:12px;min-width:0}
figcaption{font-weight:600;margin-bottom:6px}
svg{width:100%;height:auto;display:block}
.rule{stroke:var(--rule);stroke-width:1}.tick{fill:var(--soft);font-size:12px}
.line{fill:none;stroke-width:2;stroke-linejoin:round}circle.line{fill:currentColor;stroke:none}
.line.dashed{stroke-dasharray:5 4;stroke-width:1.5}
.c0{stroke:var(--c0);color:var(--c0)}.c1{stroke:var(--c1);color:var(--c1)}.c2{stroke:var(--c2);color:var(--c2)}
.c3{stroke:var(--c3);color:var(--c3)}.c4{stroke:var(--c4);color:var(--c4)}.c5{stroke:var(--c5);color:var(--c5)}
.c6{stroke:var(--c6);color:var(--c6)}.c7{stroke:var(--c7);color:var(--c7)}
.legend{font-size:13px;color:var(--soft);margin:6px 0 0}.legend b{color:var(--ink)}
.entry{display:inline-block;margin-right:14px;overflow-wrap:anywhere}
.key{display:inline-block;width:18px;height:0;border-top:3px solid currentColor;vertical-align:middle;margin-right:6px}
.key.dashed{border-top-style:dashed}
.scroll{overflow-x:auto;max-width:100%;margin:8px 0}
table{border-collapse:collapse;font-size:14px}
td,th{padding:5px 16px 5px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule)}
th{color:var(--soft);font-weight:600}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.wrap{min-width:90px;max-width:240px;overflow-wrap:anywhere}.g{white-space:nowrap}.small{font-size:12px}
.sticky tr>:first-child{position:sticky;left:0;background:var(--paper);z-index:1;
min-width:118px;max-width:min(46vw,280px);overflow-wrap:anywhere}
picture{display:block}.scene{max-width:max(100%,620px);height:auto;border-radius:8px;display:block}
.pairs{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(500px,100%),1fr));gap:16px}.pairs>*{min-width:0}
.pairs .scene{width:100%;min-width:500px}
.look{display:block;position:relative;width:100%;aspect-ratio:1;border-radius:4px;overflow:hidden;background-size:100% 100%;
background-repeat:no-repeat}.look.empty{background:var(--rule)}
.look i{position:absolute;inset:0;opacity:.55;background-size:100% 100%;background-repeat:no-repeat;image-rendering:auto}
.pixels{image-rendering:pixelated}
.cards{display:grid;grid-template-columns:repeat(4,1fr);gap:14px}
@media(max-width:820px){.cards{grid-template-columns:repeat(2,1fr);gap:10px}}
.card{background:var(--panel);border-radius:8px;padding:8px;min-width:0}.card div{display:flex;gap:4px}
.card p{font-size:13px;line-height:1.35;margin:6px 0 0;overflow-wrap:anywhere}
.card .name{overflow:hidden;text-overflow:ellipsis;white-space:nowrap;margin-top:2px}
.good{color:var(--good)}.bad{color:var(--bad)}
.same{font-size:13px}.same td,.same th{width:112px;min-width:112px;padding:4px 10px 4px 0;overflow-wrap:anywhere}
.same .look{width:96px;margin-bottom:4px}
.matrix{font-size:13px;border-spacing:2px;border-collapse:separate}
.matrix td,.matrix th{padding:3px 5px;border:0;text-align:center;min-width:28px;border-radius:3px}
.matrix td[style]{background:color-mix(in srgb,var(--bad) var(--s),var(--panel))}
.matrix td[style].d{background:color-mix(in srgb,var(--good) var(--s),var(--panel))}
.matrix th.l{text-align:right;white-space:nowrap}.matrix th.t{vertical-align:bottom}
.matrix th.t span{writing-mode:vertical-rl;transform:rotate(180deg);white-space:nowrap;max-height:160px;overflow:hidden}
details{margin:12px 0}summary{cursor:pointer;font-weight:600}
.run{border-top:1px solid var(--rule);padding-top:8px}.run>summary{font-size:16px}
)";

}  // namespace violin::viz
