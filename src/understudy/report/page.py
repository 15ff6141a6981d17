"""The frame of the page: its policy, which forbids everything but its own style, and that style."""

from __future__ import annotations

_STYLE = """
:root{color-scheme:light dark;--paper:#f7f6f2;--card:#fff;--ink:#1b1d21;--soft:#666b73;--line:#e3e1da;
--main:#2559c9;
--side:#b07a1e;--better:#0a7d57;--worse:#b3321f;--open:#5d636d;--wash:#eef2fb}
@media (prefers-color-scheme:dark){:root{--paper:#131417;--card:#1b1d21;--ink:#ecebe6;--soft:#9ca1aa;
--line:#2e3137;
--main:#7aa5ff;--side:#e0ab55;--better:#3fc893;--worse:#ff8670;--open:#a3a9b3;--wash:#20263a}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:36px 28px 60px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:30px;line-height:1.2;margin:2px 0;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:18px;margin:0 0 12px}h3{font-size:14px;margin:18px 0 6px;color:var(--soft)}
.eyebrow{margin:0;color:var(--soft);text-transform:uppercase;letter-spacing:.09em;font-size:12px}
.where,.told{color:var(--soft);margin:0 0 10px;overflow-wrap:anywhere}.where{font-size:13px}
section{margin-top:34px}
.verdict{--mood:var(--open);margin-top:18px;padding:26px 28px;background:var(--card);
border:1px solid var(--line);
border-left:8px solid var(--mood);border-radius:12px}
.verdict.better{--mood:var(--better)}.verdict.worse{--mood:var(--worse)}
.said{display:flex;gap:28px;align-items:center;flex-wrap:wrap}.said>div{flex:1 1 380px}
.verdict h2{font-size:27px;line-height:1.2;margin:0 0 6px;color:var(--mood);letter-spacing:-.01em}
.verdict p{margin:0;font-size:16px;max-width:62ch}
.verdict .big{font-size:62px;font-weight:700;line-height:1;color:var(--mood);letter-spacing:-.03em;
font-variant-numeric:tabular-nums;white-space:nowrap}
.big small{font-size:16px;font-weight:500;letter-spacing:0;margin-left:8px;color:var(--soft)}
.beside{margin:20px 0 4px;max-width:860px}
.why{list-style:none;display:flex;flex-wrap:wrap;gap:8px;margin:14px 0 0;padding:0}
.why li{padding:3px 12px 3px 8px;border:1px solid var(--line);border-radius:99px;font-size:13px}
.why li::before{display:inline-block;width:1.3em;font-weight:700}
.why .yes::before{content:"✓";color:var(--better)}.why .no::before{content:"✗";color:var(--worse)}
.totals{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:10px;margin-top:14px}
.total{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.total b{display:block;font-size:22px;font-variant-numeric:tabular-nums}
.total span{color:var(--soft);font-size:13px}.total.bad b{color:var(--worse)}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:14px}
.grid.small{grid-template-columns:repeat(auto-fit,minmax(300px,1fr))}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 14px 8px;
min-width:0}
figcaption{font-size:13px;color:var(--soft);margin-bottom:8px;overflow-wrap:anywhere}
figcaption b{color:var(--ink);font-size:15px}
figcaption em{float:right;margin-left:10px;font-style:normal;font-weight:650;color:var(--main);
font-variant-numeric:tabular-nums}
.key{margin-left:10px;white-space:nowrap}
.key::before{content:"";display:inline-block;width:10px;height:10px;border-radius:9px;margin-right:5px;
background:var(--main)}
.key.side::before{background:var(--side)}
.chart{display:block;width:100%;height:auto}
.chart text{fill:var(--soft);font:12px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif}
.chart .name{fill:var(--ink);font-size:14px}
.chart .value{fill:var(--ink);font-size:14px;font-weight:600;white-space:pre}
.rule{stroke:var(--line);stroke-width:1}.rule.strong{stroke:var(--soft)}
.line{fill:none;stroke:var(--tone);stroke-width:2.2;stroke-linejoin:round}.line.side{stroke-dasharray:5 4;
stroke-width:1.6}
.band{fill:var(--tone);opacity:.13}.whisker{stroke:var(--tone);stroke-width:1.4;opacity:.55}
.interval{stroke:var(--tone);stroke-width:6;stroke-linecap:round;opacity:.38}
.dot{fill:var(--tone);stroke:var(--card);stroke-width:1.5}
.main{--tone:var(--main)}.side{--tone:var(--side)}.better{--tone:var(--better)}.worse{--tone:var(--worse)}
.wide{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:10px}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:7px 14px;border-top:1px solid var(--line);vertical-align:top;
font-variant-numeric:tabular-nums}
td:not(:last-child){white-space:nowrap}td code{white-space:normal}
thead th{border-top:0;color:var(--soft);font-weight:500;font-size:12.5px;white-space:nowrap}
code{font:13px ui-monospace,"SF Mono",Menlo,Consolas,monospace;overflow-wrap:anywhere}
.strip{vertical-align:middle}.cell{fill:var(--main)}.cell.none{fill:none;stroke:var(--line)}
.up{color:var(--better)}.down{color:var(--worse)}.same{color:var(--soft)}
.measure{display:block;width:130px;height:9px;margin-top:6px;border-radius:9px;background:var(--wash)}
.measure i{display:block;height:100%;border-radius:9px;background:var(--side);min-width:3px}
summary{cursor:pointer;color:var(--soft);margin-bottom:8px}
footer{margin-top:40px;padding-top:16px;border-top:1px solid var(--line);color:var(--soft);font-size:13px}
footer p{max-width:100ch}
@media (max-width:560px){body{padding:20px 14px}.grid,.grid.small{grid-template-columns:1fr}
.verdict .big{font-size:46px}}
@media print{body{background:#fff;max-width:none}section{break-inside:avoid-page}}
"""

OPENING = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta name="referrer" content="no-referrer">'
    f"<title>{{title}}</title><style>{_STYLE}</style></head><body>"
)
CLOSING = "</body></html>\n"
