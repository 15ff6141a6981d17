/** Returns three to six round values from 0 up to `most`, for an axis. */
export function ticksOf(most: number): number[] {
  const rough = most / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough) ?? rough;
  const ticks: number[] = [];
  for (let index = 0; index * step <= most; index += 1) ticks.push(index * step);
  return ticks;
}
